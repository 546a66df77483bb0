"""The request hook by itself: the body that SGLang gets, and the request's context."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import HTTPException
from starlette.datastructures import Headers

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import WHOLE_PROMPT, RequestContext, current
from sgl_ext.engine.http import request_hook
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.hints import USUAL, Importance
from sgl_ext.reading.segments import Chain
from sgl_ext.reading.strip import HeaderStrip, strip_request
from sgl_ext.settings.schema import Tenant
from sgl_ext.wire.headers import DEFAULTS_HEADER
from tests.reading.test_strip import HEADER, S

Extend = Callable[..., HttpExtension]


class Request:
    """The part of SGLang's request that the hook uses."""

    def __init__(
        self, document: Any, path: str = "/v1/messages", headers: dict[str, str] | None = None
    ) -> None:
        self.url = SimpleNamespace(path=path)
        self.headers: Mapping[str, str] = headers or {}
        self.state = SimpleNamespace()
        self.scope = {"headers": [(n.encode(), v.encode()) for n, v in self.headers.items()]}
        self.parsed = document
        self.parses = 0

    async def body(self) -> bytes:
        return orjson.dumps(self.parsed)

    async def json(self) -> Any:
        self.parses += 1
        return self.parsed


async def test_a_header_is_stripped_once_and_the_body_is_parsed_once() -> None:
    request = Request({"system": f"{HEADER[:-1]}; cc_is_subagent=true;\n{S}"})
    first = await request_hook.read_body(Request.json, request)
    assert first == {"system": S}
    assert await request_hook.read_body(Request.json, request) is first
    assert request.parses == 1


@pytest.mark.parametrize("stated", ["gzip", "br, identity", "identity,zstd"])
async def test_a_compressed_body_is_refused_by_name(stated: str) -> None:
    request = Request({}, headers={"content-encoding": stated})
    with pytest.raises(HTTPException) as refused:
        await request_hook.read_body(Request.json, request)
    assert refused.value.status_code == 415
    coding = stated.replace("identity", "").strip(", ")
    assert str(refused.value.detail).startswith(f"content-encoding: {coding!r} is read by")
    plain = Request({"system": S}, headers={"content-encoding": "identity"})
    assert await request_hook.read_body(Request.json, plain) == {"system": S}


async def test_what_the_client_says_about_itself_is_in_the_context() -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-type": "Explore"}
    document = {"system": f"{HEADER[:-1]}; cc_is_subagent=true;\n{S}"}
    await request_hook.read_body(Request.json, Request(document, headers=headers))
    context = current()
    assert context is not None
    facts = context.facts
    assert (facts.request_class, facts.agent_type, facts.version) == (
        "subagent",
        "Explore",
        "2.1.197",
    )


@pytest.mark.parametrize("document", [{"system": S}, {"messages": []}])
async def test_without_a_header_the_parsed_body_is_passed_on_unchanged(document: Any) -> None:
    request = Request(document)
    assert await request_hook.read_body(Request.json, request) is document


async def test_volatile_lines_move_as_in_the_balancer(extend: Extend) -> None:
    document = {
        "system": f"{HEADER}\nToday's date is 2026-11-22.\n{S}",
        "messages": [{"role": "user", "content": "hi"}],
    }
    plain = await request_hook.read_body(Request.json, Request(document))
    assert plain["messages"] == document["messages"]
    extend(move_volatile_lines=True)
    moved = await request_hook.read_body(Request.json, Request(document))
    strip = HeaderStrip(moves_lines=True)
    assert moved == strip_request(of_path("/v1/messages"), document, strip).body
    assert moved["system"] == S
    context = current()
    assert context is not None
    assert context.body is moved


async def test_without_names_nothing_is_stripped(extend: Extend) -> None:
    extend(strip_headers=())
    request = Request({"system": f"{HEADER}\n{S}"})
    assert await request_hook.read_body(Request.json, request) is request.parsed


@pytest.mark.parametrize(("sort_tools", "first"), [(True, "a"), (False, "b")])
async def test_tools_are_sorted_if_the_settings_say_so(
    extend: Extend, sort_tools: bool, first: str
) -> None:
    extend(sort_tools=sort_tools)
    request = Request({"tools": [{"name": "b"}, {"name": "a"}], "messages": []})
    assert (await request_hook.read_body(Request.json, request))["tools"][0] == {"name": first}


async def test_schemas_are_sorted_if_the_settings_say_so(extend: Extend) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    body = {"tools": [{"name": "a", "input_schema": schema}], "messages": []}
    for sort, first in ((True, "a"), (False, "b")):
        extend(sort_schema_keys=sort)
        found = await request_hook.read_body(Request.json, Request(body))
        assert next(iter(found["tools"][0]["input_schema"]["properties"])) == first


async def test_cache_hints_are_in_the_request_s_context() -> None:
    document = {"prompt": "text", "nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}
    headers = {"x-tenant-id": "t", "session-id": "s", "x-sgl-ext-session-final": "true"}
    await request_hook.read_body(Request.json, Request(document, "/v1/completions", headers))
    context = current()
    assert context is not None
    assert (context.owner, context.session, context.is_last) == ("t", "s", True)
    assert context.pins == ((WHOLE_PROMPT, 3600.0),)


async def test_an_agent_hint_sets_session_priority_lease_and_end() -> None:
    said = {"session": "run-7", "soft_priority": -3, "state": "done", "pin": True}
    hint = base64.urlsafe_b64encode(orjson.dumps(said)).decode()
    request = Request({"messages": []}, headers={"x-agent-hint": hint})
    await request_hook.read_body(Request.json, request)
    context = current()
    assert context is not None
    assert (context.session, context.is_last) == ("run-7", True)
    assert context.importance.priority == -3
    assert context.pins == ((WHOLE_PROMPT, 300.0),)


@pytest.mark.parametrize(
    ("agent", "betas", "ttl_s"),
    [
        ({"x-claude-code-agent-id": "a1"}, "prompt-caching-evict-2026-05-12", 60.0),
        ({"x-claude-code-agent-id": "a1"}, "extended-cache-ttl-2025-04-11", 3600.0),
        ({}, "prompt-caching-evict-2026-05-12", 3600.0),
    ],
)
async def test_a_sub_agent_that_lets_its_cache_go_is_pinned_from_turn_to_turn(
    agent: dict[str, str], betas: str, ttl_s: float
) -> None:
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    document = {"messages": [], "nvext": marked}
    headers = {"user-agent": "claude-cli/2.1.332", "anthropic-beta": betas, **agent}
    await request_hook.read_body(Request.json, Request(document, headers=headers))
    context = current()
    assert context is not None
    assert context.pins == ((WHOLE_PROMPT, ttl_s),)


def hinted(*kinds: str, **payload: Any) -> dict[str, Any]:
    actions = [{"action_type": kind, "payload": payload} for kind in kinds]
    return {"messages": [], "kv_hints": {"actions": actions}}


async def test_kv_hints_are_in_the_request_s_context_and_counted() -> None:
    others = counter("kv_hints").labels("other")
    before = others._value.get()
    document = hinted("kv.pin", "kv.fetch", "kv.prefetch") | {"priority": 3}
    await request_hook.read_body(Request.json, Request(document))
    context = current()
    assert context is not None
    assert context.pins == ((WHOLE_PROMPT, 300.0),)
    assert context.importance == Importance(3, speculative_prefill=True)
    assert others._value.get() - before == 1
    document = hinted("kv.demote") | {"nvext": {"cache_control": {"type": "ephemeral"}}}
    await request_hook.read_body(Request.json, Request(document))
    context = current()
    assert context is not None
    assert (context.is_demoted, context.marks.keep, context.pins) == (True, False, ())
    with pytest.raises(HTTPException, match=r"kv_hints.actions.0.payload.ttl: must be") as told:
        await request_hook.read_body(Request.json, Request(hinted("kv.pin", ttl="soon")))
    assert told.value.detail["param"] == "kv_hints.actions.0.payload.ttl"  # type: ignore[index]


TENANTS = (Tenant("people", 200), Tenant("batch", -5))


@pytest.mark.parametrize(
    ("tenant", "header", "hint", "own", "priority", "clamped"),
    [
        (None, None, None, None, 0, 0),
        (None, "60", None, None, 50, 1),
        ("another", "60", None, None, 50, 1),
        ("people", "60", None, None, 60, 0),
        ("people", "201", None, None, 200, 1),
        ("people", None, 201, None, 200, 1),
        ("people", None, None, 201, 200, 1),
        ("people", "300", 400, 500, 200, 1),
        ("batch", None, None, None, -5, 0),
        ("batch", "10", None, None, -5, 1),
        ("batch", "10", 100, None, -5, 1),
        ("batch", None, 100, 100, -5, 1),
        ("batch", "-6", 100, 100, -6, 0),
    ],
)
async def test_a_priority_is_clamped_to_the_tenant_s_and_counted(
    extend: Extend,
    tenant: str | None,
    header: str | None,
    hint: int | None,
    own: int | None,
    priority: int,
    clamped: int,
) -> None:
    extend(tenants=TENANTS, max_priority=50)
    headers = {"x-tenant-id": tenant, "x-sgl-ext-priority": header}
    document = {"text": "t", "priority": own, "nvext": {"agent_hints": {"priority": hint}}}
    counted = counter("priority_clamped").labels("/generate")._value
    before = counted.get()
    given = {name: value for name, value in headers.items() if value is not None}
    await request_hook.read_body(Request.json, Request(document, "/generate", given))
    context = current()
    assert context is not None
    assert (context.importance.priority, context.owner) == (priority, tenant or "")
    assert counted.get() - before == clamped


async def test_a_chain_that_is_too_long_is_left_out() -> None:
    count = request_hook.MAX_SEGMENTS + 1
    messages = [{"role": "user", "content": "a"}] * count
    before = counter("long_chains_ignored")._value.get()
    await request_hook.read_body(Request.json, Request({"messages": messages}))
    context = current()
    assert context is not None
    assert context.chain == Chain()
    assert counter("long_chains_ignored")._value.get() == before + 1


async def test_of_two_tenant_headers_the_last_counts() -> None:
    request = Request({"text": "t"}, "/generate")
    request.headers = Headers(raw=[(b"x-tenant-id", b"clients"), (b"x-tenant-id", b"proxys")])
    await request_hook.read_body(Request.json, request)
    context = current()
    assert context is not None
    assert context.owner == "proxys"


@pytest.mark.parametrize(
    ("header", "seconds", "malformed"),
    [
        (None, 0.0, 0),
        ("12.345", 12.345, 0),
        ("0", 0.0, 0),
        ("99999", 3600.0, 0),
        *((bad, 0.0, 1) for bad in ("", "-1", "nan", "inf", "1e9", "soon", "9" * 400)),
    ],
)
@pytest.mark.parametrize("name", ["queued_s", "window_s"])
async def test_what_the_balancer_says_of_its_queue_is_read_bounded_and_ignored_if_malformed(
    name: str, header: str | None, seconds: float, malformed: int
) -> None:
    counted = counter("queued_headers_malformed").labels("/generate")._value
    before = counted.get()
    headers = {} if header is None else {f"x-sgl-ext-{name.replace('_', '-')}": header}
    await request_hook.read_body(Request.json, Request({"text": "t"}, "/generate", headers))
    context = current()
    assert context is not None
    assert getattr(context, name) == seconds
    assert counted.get() - before == malformed


async def test_a_malformed_hint_is_rejected_by_its_field() -> None:
    document = {"text": "t", "nvext": {"cache_control": {"type": "ephemeral", "ttl": "forever"}}}
    with pytest.raises(HTTPException) as told:
        await request_hook.read_body(Request.json, Request(document, "/generate"))
    assert told.value.status_code == 400
    detail: Any = told.value.detail
    assert detail["message"].startswith("nvext.cache_control.ttl: ")
    assert detail["param"] == "nvext.cache_control.ttl"


@pytest.mark.parametrize("document", [[1], "text", None, 5])
async def test_a_body_that_is_no_object_is_rejected(document: Any) -> None:
    request = Request(document)
    with pytest.raises(HTTPException, match=r"^400: body: must be a JSON object$"):
        await request_hook.read_body(Request.json, request)
    native = Request(document, "/generate")
    assert await request_hook.read_body(Request.json, native) == document


async def test_the_body_for_sglang_is_translated_and_the_context_has_it_as_sent() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    document = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    counted = counter("translated_parts").labels("/v1/messages", "web_search_tool")._value
    before = counted.get()
    assert (await request_hook.read_body(Request.json, Request(document)))["tools"] == []
    assert counted.get() - before == 1
    context = current()
    assert context is not None
    assert context.body["tools"] is tools


async def test_default_hints_of_the_balancer_count_where_the_body_says_nothing(
    extend: Extend,
) -> None:
    extend(max_priority=50)
    headers = {DEFAULTS_HEADER: '{"priority":90,"osl":7,"prefill":true,"ttl_s":600}'}
    document = {"prompt": "text", "nvext": {"agent_hints": {"osl": 3}}}
    await request_hook.read_body(Request.json, Request(document, "/v1/completions", headers))
    context = current()
    assert context is not None
    assert context.pins == ((WHOLE_PROMPT, 600.0),)
    assert context.importance == Importance(50, 3, speculative_prefill=True)


async def test_malformed_default_hints_are_ignored_and_counted() -> None:
    counted = counter("default_hints_malformed").labels("/v1/completions")._value
    before = counted.get()
    headers = {DEFAULTS_HEADER: "{"}
    await request_hook.read_body(Request.json, Request({"prompt": "t"}, "/v1/completions", headers))
    assert counted.get() - before == 1
    assert (context := current()) is not None
    assert context.importance is USUAL


CODEX = {"session-id": "s", "user-agent": "codex_exec/0.171.0"}
OFFERED = [{"type": "function", "name": "look", "parameters": {}}]
SUM_UP = "You are performing a CONTEXT CHECKPOINT COMPACTION. Write a summary for another LLM."


def codex(text: str, tools: list[Any], headers: dict[str, str] = CODEX) -> Request:
    said = [{"type": "message", "role": "user", "content": each} for each in ("Begin.", text)]
    body = {"model": "m", "input": said, "tools": tools, "tool_choice": "auto"}
    return Request(body, "/v1/responses", headers)


async def sent(request: Request) -> tuple[list[Any], Any, RequestContext]:
    """The tools and the choice that SGLang gets, and the context."""
    body = await request_hook.read_body(Request.json, request)
    context = current()
    assert context is not None
    return [tool["name"] for tool in body["tools"]], body["tool_choice"], context


async def test_a_request_for_a_summary_keeps_the_tools_of_its_conversation(extend: Extend) -> None:
    extend()
    await sent(codex("Go on.", OFFERED))
    tools, choice, context = await sent(codex(SUM_UP, []))
    assert (tools, choice) == (["look"], "none")
    assert context.summary is not None
    assert context.summary.keeps_tools
    assert context.chain.tool_segments > 0
    tools, choice, context = await sent(codex("Go on.", []))
    assert (tools, choice, context.summary) == ([], "auto", None)


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({"keep_tools": False}, CODEX),
        ({}, CODEX | {"session-id": "another"}),
        ({}, CODEX | {"x-tenant-id": "another"}),
    ],
)
async def test_it_has_no_tools_of_others(
    extend: Extend, settings: dict[str, Any], headers: dict[str, str]
) -> None:
    extend(**settings)
    await sent(codex("Go on.", OFFERED))
    tools, choice, _ = await sent(codex(SUM_UP, [], headers))
    assert (tools, choice) == ([], "auto")
