"""Name spaces of the engine's cache: one for each group, whatever a client sends.

No tenant's request can have, abort or be kept from another's name, and adapters are granted.

The names of requests in the scheduler begin with their ids, and none begins with another.
"""

from __future__ import annotations

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from sgl_ext.engine.core import request_names
from sgl_ext.engine.core.request_context import DryRun, RequestContext, Stopped, entered
from sgl_ext.engine.core.request_names import (
    check_adapters,
    group_of,
    isolate,
    keep_id,
    name_after_id,
    name_request,
    new_name,
    request_id_of,
    salted,
)
from sgl_ext.engine.http import request_hook
from sgl_ext.engine.prefill_ahead.prefiller import Job, Prefiller
from sgl_ext.engine.prefill_ahead.service import PrefillRequests
from sgl_ext.protocols.request_ids import is_valid_id
from sgl_ext.reading.cache_marks import NO_MARKS
from sgl_ext.reading.segments import Chain
from sgl_ext.settings.schema import Tenant
from sgl_ext.tenants import Tenants

TEXT = st.text(alphabet="0123456789:ab", max_size=6)


@given(TEXT, TEXT, TEXT, TEXT)
def test_two_groups_never_have_the_same_salt(
    group: str, own: str, other_group: str, other_own: str
) -> None:
    if group != other_group:
        assert salted(group, own) != salted(other_group, other_own)
        assert salted(group, salted(other_group, other_own)) != salted(other_group, other_own)
    assert salted(group, salted(group, own)) == salted(group, own)
    assert salted(group, None) == salted(group, "")


def test_each_prompt_of_a_batch_is_salted() -> None:
    assert salted("team", ["x", None]) == ["4:teamx", "4:team"]
    for bad in (5, {"a": 1}, [5], [["x", 5]]):
        with pytest.raises(ValueError, match="cache_salt should be"):
            salted("team", bad)


def test_a_request_without_a_group_is_unchanged() -> None:
    request = SimpleNamespace(cache_salt="x")
    isolate(request, None)
    assert request.cache_salt == "x"
    isolate(request, "")
    assert request.cache_salt == "0:x"


def test_the_group_is_the_context_s_or_else_the_headers() -> None:
    raw: Any = SimpleNamespace(headers={"x-sgl-ext-cache-group": "of headers"})
    assert group_of(SimpleNamespace(group=None), raw) is None
    assert group_of(SimpleNamespace(group="read"), raw) == "read"
    assert group_of(None, raw) == "of headers"
    assert group_of(None, None) is None


def test_embeddings_have_no_name_spaces_and_are_rejected_where_they_would_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(disable_radix_cache=True)
    monkeypatch.setattr(request_names, "in_effect", lambda: args)
    isolate(SimpleNamespace(), "team")
    args.disable_radix_cache = False
    isolate(SimpleNamespace(), None)
    with pytest.raises(ValueError, match="--disable-radix-cache"):
        isolate(SimpleNamespace(), "team")


def context_of(**more: Any) -> RequestContext:
    return RequestContext("/v1/messages", {}, Chain(), NO_MARKS, **more)


def generated_from(**fields: Any) -> Any:
    """A request of a group with the client's salt "x", after the generation hook."""
    request = SimpleNamespace(cache_salt="x", session_params=None, kv_hints=None)
    with entered(context_of(group="team", **fields)):
        request_hook.send_hints(None, request)
    return request


def test_a_request_is_salted_and_a_slice_is_not_salted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert generated_from().cache_salt == "4:teamx"
    monkeypatch.setattr(request_hook, "is_slice", lambda request: True)
    assert generated_from().cache_salt == "x"


def test_what_a_dry_run_comes_to_is_salted() -> None:
    found = DryRun()
    with pytest.raises(Stopped):
        generated_from(dry_run=found)
    assert found.request is not None
    assert found.request.cache_salt == "4:teamx"


@pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported
@pytest.mark.parametrize(("owner", "deleted"), [("bob", 0), ("alice", 1), (None, 1)])
async def test_only_the_owner_s_prefills_are_deleted(owner: str | None, deleted: int) -> None:
    sizes = {"page_size": 1, "dp_size": 1, "attn_dp_size": 1, "dcp_size": 1}
    anything: Any = SimpleNamespace(**sizes, chunked_prefill_size=None)
    prefiller = Prefiller(anything, anything, 256)
    requests = PrefillRequests(None, anything, prefiller)
    context = context_of(owner="alice", session="s")
    body: Any = SimpleNamespace(extra_key=None, cache_salt=None, lora_path=None)
    prefiller.put(Job("name", [1], body, context))
    headers = [] if owner is None else [(b"x-sgl-ext-owner", owner.encode())]
    scope = {"type": "http", "method": "DELETE", "query_string": b"session=s", "headers": headers}
    answer = await requests.delete(Request(scope))
    assert json.loads(bytes(answer.body)) == {"deleted": deleted}


NAMES = st.one_of(st.sampled_from(["", "1", "a", "1:a:", "~1:a:1", "2:aa:"]), st.text(max_size=8))
OWNERS = st.sampled_from(["a", "aa", "1", "a:", "~"])


def named(owner: str, rid: Any, field: str = "rid") -> Any:
    request = SimpleNamespace(rid=rid)
    name_request(request, RequestContext(body={field: rid}, owner=owner))
    return request.rid


@given(OWNERS, NAMES, OWNERS, NAMES)
def test_no_name_begins_with_another_tenants(one: str, x: str, other: str, y: str) -> None:
    """SGLang aborts every request whose name begins with that of one whose client left."""
    made = uuid4().hex
    assert not made.startswith(named(one, x))
    assert not named(one, x).startswith(made)
    if one != other:
        assert not named(other, y).startswith(named(one, x))


@given(OWNERS, NAMES)
def test_a_tenants_names_stay_apart_and_are_named_once(owner: str, x: str) -> None:
    assert named(owner, named(owner, x)) == named(owner, x)
    assert named(owner, x).endswith(x)
    assert named(owner, [x, "b"], "request_id") == [named(owner, x), named(owner, "b")]


@given(NAMES)
def test_without_a_tenant_a_name_stays_unless_it_could_be_a_tenants(x: str) -> None:
    if x.startswith("~"):
        with pytest.raises(ValueError, match="rid: must not begin"):
            named("", x)
    else:
        assert named("", x) == x


def test_a_name_that_sglang_made_stays() -> None:
    request = SimpleNamespace(rid="resp_1")
    name_request(request, RequestContext(body={"input": "hi"}, owner="a"))
    assert request.rid == "resp_1"
    for malformed in (None, 7, {}):
        assert named("a", malformed) == malformed


TENANTS = Tenants([Tenant("some", 0, adapters="x y"), Tenant("all", 0, adapters="*")])


@pytest.mark.parametrize(
    ("tenant", "granted"),
    [("some", {"x", "y"}), ("all", {"x", "y", "z"}), ("unknown", set()), ("", {"x", "y", "z"})],
)
def test_a_tenant_names_only_adapters_that_it_was_granted(tenant: str, granted: set[str]) -> None:
    def is_allowed(named: Any) -> bool:
        with suppress(ValueError):
            check_adapters(SimpleNamespace(lora_path=named), TENANTS.of(tenant))
            return True
        return False

    assert {name for name in "xyz" if is_allowed(name)} == granted
    assert {name for name in "xyz" if is_allowed([None, name])} == granted
    assert is_allowed(None)
    assert is_allowed([None])


IDS = st.from_regex(r"[A-Za-z0-9._+/=@#-]{1,12}", fullmatch=True)
PURPOSES = st.sampled_from(["", "retry-1", "retry-12", "standby"])


def context_with_id(request_id: str, **fields: Any) -> RequestContext:
    return RequestContext(body=fields.pop("body", {}), request_id=request_id, **fields)


@given(IDS, PURPOSES, IDS, PURPOSES)
def test_no_name_begins_with_another(one: str, why: str, other: str, other_why: str) -> None:
    """SGLang aborts every request whose name begins with that of one whose client left. A client
    knows the names of its requests, and may state such a name as an id."""
    name, another = (
        new_name(context_with_id(i, purpose=w)) for i, w in ((one, why), (other, other_why))
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
        assert not new_name(context_with_id(stated)).startswith(request.rid)


def test_two_requests_with_one_id_have_two_names() -> None:
    assert new_name(context_with_id("x")) != new_name(context_with_id("x"))


def named_by_id(body: Any = None, **request: Any) -> Any:
    made = SimpleNamespace(**{"rid": None, "text": None, "input_ids": None, **request})
    name_after_id(made, context_with_id("x", body=body or {}))
    return made.rid


def test_each_prompt_of_a_batch_has_a_name() -> None:
    assert named_by_id(text="one").startswith("~x~")
    assert named_by_id(input_ids=[1, 2]).startswith("~x~")
    for names in (named_by_id(text=["one", "two"]), named_by_id(input_ids=[[1], [2]])):
        assert len(set(names)) == 2
        assert all(name.startswith("~x~") for name in names)


def test_names_stay_by_which_a_client_aborts_or_cancels() -> None:
    assert named_by_id({"rid": "mine"}, rid="mine", text="one") == "mine"
    assert named_by_id({"background": True}, rid="resp_1", input_ids=[1]) == "resp_1"
    assert named_by_id({}, rid="resp_1", input_ids=[1]).startswith("~x~")
    assert named_by_id(image_data=[[1], [2]]) is None


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
