"""The names of requests in the scheduler begin with their ids, and none begins with another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.core.request_names import (
    keep_id,
    name_after_id,
    name_request,
    new_name,
    request_id_of,
)
from sgl_ext.protocols.request_ids import is_valid_id

IDS = st.from_regex(r"[A-Za-z0-9._+/=@#-]{1,12}", fullmatch=True)
PURPOSES = st.sampled_from(["", "retry-1", "retry-12", "standby"])


def context_of(request_id: str, **fields: Any) -> RequestContext:
    return RequestContext(body=fields.pop("body", {}), request_id=request_id, **fields)


@given(IDS, PURPOSES, IDS, PURPOSES)
def test_no_name_begins_with_another(one: str, why: str, other: str, other_why: str) -> None:
    """SGLang aborts every request whose name begins with that of one whose client left. A client
    knows the names of its requests, and may state such a name as an id."""
    name, another = (
        new_name(context_of(i, purpose=w)) for i, w in ((one, why), (other, other_why))
    )
    assert name.startswith(f"~{one}~")
    assert not name.startswith(another)
    assert not another.startswith(name)
    assert not is_valid_id(name)


@given(IDS, st.text(max_size=8), st.sampled_from(["", "a", "4", "4:team"]))
def test_no_name_begins_with_one_that_a_client_chose(stated: str, rid: str, owner: str) -> None:
    request = SimpleNamespace(rid=rid)
    try:
        name_request(request, RequestContext(body={"rid": rid}, owner=owner))
    except ValueError:
        return
    if request.rid:
        assert not new_name(context_of(stated)).startswith(request.rid)


def test_two_requests_with_one_id_have_two_names() -> None:
    assert new_name(context_of("x")) != new_name(context_of("x"))


def named(body: Any = None, **request: Any) -> Any:
    made = SimpleNamespace(**{"rid": None, "text": None, "input_ids": None, **request})
    name_after_id(made, context_of("x", body=body or {}))
    return made.rid


def test_each_prompt_of_a_batch_has_a_name() -> None:
    assert named(text="one").startswith("~x~")
    assert named(input_ids=[1, 2]).startswith("~x~")
    for names in (named(text=["one", "two"]), named(input_ids=[[1], [2]])):
        assert len(set(names)) == 2
        assert all(name.startswith("~x~") for name in names)


def test_names_stay_by_which_a_client_aborts_or_cancels() -> None:
    assert named({"rid": "mine"}, rid="mine", text="one") == "mine"
    assert named({"background": True}, rid="resp_1", input_ids=[1]) == "resp_1"
    assert named({}, rid="resp_1", input_ids=[1]).startswith("~x~")
    assert named(image_data=[[1], [2]]) is None


@pytest.mark.parametrize("rid", ["~x~0", ["~x~0", "~x~retry-1~0"]])
def test_samples_of_one_request_keep_its_id(rid: Any) -> None:
    request = SimpleNamespace(rid=rid)
    keep_id(lambda _: "made", request)
    before, after = (r if isinstance(r, list) else [r] for r in (rid, request.rid))
    for old, new in zip(before, after, strict=True):
        assert new != old
        assert new.rpartition("~")[0] == old.rpartition("~")[0]


def test_samples_of_a_request_that_sglang_named_have_names_of_sglang() -> None:
    assert keep_id(lambda _: "made", SimpleNamespace(rid="resp_1")) == "made"


def scope_of(*ids: bytes) -> dict[str, Any]:
    return {"headers": [(b"x-request-id", value) for value in ids]}


def test_the_id_is_the_stated_one_or_made_once() -> None:
    assert request_id_of(scope_of(b"mine")) == "mine"
    for scope in (scope_of(), scope_of(b"a b"), scope_of(b"a", b"b")):
        made = request_id_of(scope)
        assert made.startswith("req_")
        assert request_id_of(scope) == made
