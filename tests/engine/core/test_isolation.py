"""Name spaces of the engine's cache: one for each group, whatever a client sends."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from sgl_ext.engine.core import request_names
from sgl_ext.engine.core.request_context import DryRun, RequestContext, Stopped, entered
from sgl_ext.engine.core.request_names import group_of, isolate, salted
from sgl_ext.engine.http import generation_hook
from sgl_ext.engine.prefill_ahead.prefiller import Job, Prefiller
from sgl_ext.engine.prefill_ahead.service import PrefillRequests
from sgl_ext.reading.cache_marks import NO_MARKS
from sgl_ext.reading.segments import Chain

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
        generation_hook.send_hints(None, request)
    return request


def test_a_request_is_salted_and_a_slice_is_not_salted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert generated_from().cache_salt == "4:teamx"
    monkeypatch.setattr(generation_hook, "is_slice", lambda request: True)
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
