"""Cache diagnostics in answers: who asks is told why the cache missed, and nobody else is."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

from scheduler.placement import Placement
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.cache_turns import CacheTurn, CacheTurns
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.membership.member import Member
from sgl_ext.prompts.cache_miss import settings_of
from sgl_ext.protocols.cache_diagnostics import NOT_FOUND, Question
from sgl_ext.reading.segments import Chain
from tests.balancer.conftest import Start
from tests.balancer.reporting.cached_engine import TEXT, CachedEngine
from tests.prompts.examples import CHAT, MESSAGES, RESPONSES, SYSTEM, TOOLS

LONG = "What was found before matters here as well. " * 60


def turn(path: str, count: int = 0, **changed: Any) -> dict[str, Any]:
    """The same conversation in each protocol, with `count` turns after the first."""
    said: list[dict[str, Any]] = [{"role": "user", "content": f"Find it. {LONG}"}]
    for number in range(count):
        said += [
            {"role": "assistant", "content": f"Part {number} is done. {LONG}"},
            {"role": "user", "content": f"Now part {number + 1}. {LONG}"},
        ]
    body: dict[str, Any] = {"model": "m", "tools": TOOLS}
    if path == MESSAGES:
        body |= {"system": SYSTEM, "messages": said, "max_tokens": 9}
    elif path == RESPONSES:
        body |= {"instructions": SYSTEM, "input": said, "store": False}
    else:
        body["messages"] = [{"role": "system", "content": SYSTEM}, *said]
    return body | changed


def other_system(path: str) -> dict[str, Any]:
    if path == CHAT:
        changed = {"role": "system", "content": f"Now. {SYSTEM}"}
        return {"messages": [changed, *turn(path, 1)["messages"][1:]]}
    return {"system" if path == MESSAGES else "instructions": f"Now. {SYSTEM}"}


def asking(path: str, id: str | None) -> dict[str, Any]:
    if path == MESSAGES:
        return {"diagnostics": {"previous_message_id": id}}
    return {"prompt_cache_options": {"comparison_response_id": id}}


async def ask(
    client: ClientSession, path: str, body: dict[str, Any], **headers: str
) -> dict[str, Any]:
    """The object of the answer that tells, with what it tells at `told`."""
    async with client.post(path, json=body, headers=headers) as answered:
        raw = await answered.read()
        assert answered.status == 200, raw
    if not body.get("stream"):
        answer: dict[str, Any] = orjson.loads(raw)
    else:
        lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
        events = [orjson.loads(line) for line in lines]
        assert TEXT in [_text(event) for event in events], "the rest is as it was"
        told = [_holder(event) for event in events]
        found = [each for each in told if each.keys() & {"diagnostics", "prompt_cache_diagnostics"}]
        assert len(found) <= 1
        answer = found[0] if found else told[0]
    key = "diagnostics" if path == MESSAGES else "prompt_cache_diagnostics"
    return answer | {"told": answer[key]} if key in answer else answer


def _text(event: dict[str, Any]) -> Any:
    delta = event.get("delta") or (event.get("choices") or [{}])[0].get("delta") or {}
    return delta if isinstance(delta, str) else delta.get("text") or delta.get("content")


def _holder(event: dict[str, Any]) -> dict[str, Any]:
    for key in ("message", "response"):
        if isinstance(event.get(key), dict):
            holder: dict[str, Any] = event[key]
            return holder
    return event


def reason(told: Any) -> str:
    """What was told, in one word."""
    if told is None:
        return "none"
    told = told.get("cache_miss_reason", told)
    return str(told.get("reason") or told["type"])


STREAMED = pytest.mark.parametrize("stream", [False, True])
WORDS = {
    MESSAGES: ("system_changed", "none", "previous_message_not_found"),
    RESPONSES: ("input_changed", "cache_hit", "comparison_response_not_found"),
    CHAT: ("input_changed", "cache_hit", "comparison_response_not_found"),
}


@STREAMED
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, CHAT])
async def test_a_changed_prompt_and_an_unchanged_one_are_told_apart(
    start: Start, path: str, stream: bool
) -> None:
    changed, same, unknown = WORDS[path]
    client = await start(engine := CachedEngine())
    ends = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    first = await ask(client, path, turn(path) | asking(path, None) | ends)
    assert reason(first["told"]) == same
    second = await ask(client, path, turn(path, 1) | asking(path, engine.ids[0]) | ends)
    assert reason(second["told"]) == same
    third = turn(path, 1) | other_system(path) | asking(path, engine.ids[1]) | ends
    told = (await ask(client, path, third))["told"]
    assert reason(told) == changed
    lost = told.get("cache_missed_tokens") or told["cache_miss_reason"]["cache_missed_input_tokens"]
    assert 0 < lost < len(orjson.dumps(third)) / 4
    never = await ask(client, path, turn(path, 2) | asking(path, "msg_never") | ends)
    assert reason(never["told"]) == unknown
    plain = await ask(client, path, turn(path, 3) | ends)
    assert "told" not in plain


@STREAMED
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, CHAT])
async def test_what_the_engine_lost_is_evicted(start: Start, path: str, stream: bool) -> None:
    client = await start(engine := CachedEngine())
    ends = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    await ask(client, path, turn(path) | asking(path, None) | ends)
    await settled(client, f"{engine.held_segments}.0")
    engine.flush()
    await settled(client, "0.0")
    told = (await ask(client, path, turn(path, 1) | asking(path, engine.ids[0]) | ends))["told"]
    assert reason(told) == "unavailable"
    found = told.get("cache_miss_reason", told)
    assert found["cause"] == "evicted"
    assert (found.get("cache_missed_tokens") or found["cache_missed_input_tokens"]) > 1000
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_cache_diagnoses_total{reason="evicted"} 1.0' in page


async def settled(client: ClientSession, segments: str) -> None:
    """Waits until the balancer's index has so many segments."""

    async def is_so() -> bool:
        return f"sgl_ext_index_segments {segments}" in await (await client.get("/metrics")).text()

    for _ in range(1000):
        if await is_so():
            return
    pytest.fail("the index did not change")


async def test_history_that_is_rendered_anew_is_no_eviction(start: Start) -> None:
    client = await start(engine := CachedEngine())
    await ask(client, MESSAGES, turn(MESSAGES) | asking(MESSAGES, None))
    await settled(client, f"{engine.held_segments}.0")
    engine.rendered_anew = 600
    body = turn(MESSAGES, 1) | asking(MESSAGES, engine.ids[0])
    told = (await ask(client, MESSAGES, body))["told"]
    assert told == {"cache_miss_reason": {"type": "unavailable", "cause": "rendering"}}
    asked = turn(RESPONSES, model="n") | {"reasoning": {"effort": "high"}}
    await ask(client, RESPONSES, asked)
    await settled(client, f"{engine.held_segments}.0")
    again = turn(RESPONSES, 1, model="n") | asking(RESPONSES, engine.ids[-1])
    told = (await ask(client, RESPONSES, again))["told"]
    assert told["reason"] == "reasoning_effort_changed"


@pytest.mark.parametrize(
    ("changed", "messages", "responses"),
    [
        ({"model": "other"}, "model_changed", "model_changed"),
        ({"tools": TOOLS[::-1]}, "tools_changed", "tools_changed"),
        ({"tools": []}, "tools_changed", "tools_changed"),
        ({"messages": None, "input": None}, "messages_changed", "input_changed"),
        ({"cache_salt": "x"}, "unavailable", "unavailable"),
    ],
)
async def test_each_part_has_its_reason(
    start: Start, changed: dict[str, Any], messages: str, responses: str
) -> None:
    client = await start(engine := CachedEngine())
    for path, expected in ((MESSAGES, messages), (RESPONSES, responses)):
        await ask(client, path, turn(path, 2) | asking(path, None))
        body = turn(path, 3) | asking(path, engine.ids[-1])
        body |= {key: value for key, value in changed.items() if value is not None}
        if "messages" in changed:
            said = body["messages" if path == MESSAGES else "input"]
            said[1]["content"] = f"I did something else. {LONG}"
        assert reason((await ask(client, path, body))["told"]) == expected


async def test_a_compaction_is_told_in_openais_word(start: Start) -> None:
    client = await start(engine := CachedEngine())
    await ask(client, RESPONSES, turn(RESPONSES, 8))
    body = turn(RESPONSES, 0, input="In short: all was done.")
    told = (await ask(client, RESPONSES, body | asking(RESPONSES, engine.ids[-1])))["told"]
    assert told["reason"] == "context_compacted"
    assert told["cache_missed_tokens"] < told["comparison_reusable_tokens"]


async def test_with_the_doctor_the_place_and_the_cause_are_told(start: Start) -> None:
    client = await start(engine := CachedEngine(), diagnose=True)
    for count, second in enumerate((0, 0, 1)):
        now = f"It is 2026-01-01 12:00:0{second}.\n{SYSTEM}"
        earlier = engine.ids[-1] if engine.ids else None
        body = turn(MESSAGES, count, system=now) | asking(MESSAGES, earlier)
        told = (await ask(client, MESSAGES, body))["told"]
    found = told["cache_miss_reason"]
    assert found.pop("cache_missed_input_tokens") > 1000
    assert found == {"type": "system_changed", "block": "system", "byte": 24, "cause": "clock"}


async def test_the_doctor_tells_evictions_from_changes(start: Start) -> None:
    client = await start(engine := CachedEngine(), diagnose=True)
    for count in range(3):
        await ask(client, MESSAGES, turn(MESSAGES, count))
        await settled(client, f"{engine.held_segments}.0")
    engine.flush()
    await settled(client, "0.0")
    await ask(client, MESSAGES, turn(MESSAGES, 3))
    await ask(client, MESSAGES, turn(MESSAGES, 4))
    document = await (await client.get("/sgl_ext/divergences")).json()
    (row,) = document["harnesses"][0]["findings"]
    assert (row["kind"], row["where"], row["times"]) == ("evicted", "cache", 1)
    assert row["estimated"] is False
    page = await (await client.get("/metrics")).text()
    assert 'kind="evicted"} 1.0' in page


async def test_another_tenants_answer_is_like_one_that_never_was(start: Start) -> None:
    client = await start(engine := CachedEngine())
    await ask(client, MESSAGES, turn(MESSAGES) | asking(MESSAGES, None), **{"x-tenant-id": "a"})
    theirs = turn(MESSAGES, 1) | asking(MESSAGES, engine.ids[0])
    never = turn(MESSAGES, 1) | asking(MESSAGES, "msg_never")
    told = [
        (await ask(client, MESSAGES, body, **{"x-tenant-id": "b"}))["told"]
        for body in (theirs, never)
    ]
    assert told[0] == told[1] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    own = await ask(client, MESSAGES, theirs, **{"x-tenant-id": "a"})
    assert own["told"] is None


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (MESSAGES, {"diagnostics": 3}, "diagnostics"),
        (MESSAGES, {"diagnostics": {"previous_message_id": 3}}, "diagnostics.previous_message_id"),
        (MESSAGES, {"diagnostics": {"previous_message_id": "x" * 999}}, "previous_message_id"),
        (
            RESPONSES,
            {"prompt_cache_options": {"comparison_response_id": []}},
            "comparison_response",
        ),
    ],
)
async def test_a_malformed_question_is_an_error_that_names_it(
    start: Start, path: str, body: dict[str, Any], field: str
) -> None:
    client = await start(CachedEngine())
    async with client.post(path, json=turn(path) | body) as answered:
        assert answered.status == 400
        assert field in (await answered.json())["error"]["message"]


def test_fingerprints_are_bounded() -> None:
    metrics = Metrics()
    turns = CacheTurns(metrics, None, limit_bytes=100_000)
    chain = Chain(tuple(range(100)), tuple(range(1, 101)))
    worker = Worker(Member(id="e", url="http://e"), 0)
    routing = RoutingRequest(chain, None, 0, 25)
    attempt = Attempt(routing, worker, worker, Placement("e", "new"))

    def asked(earlier: str | None) -> CacheTurn:
        return CacheTurn(MESSAGES, "t", Question(earlier, True), settings_of({}), None)

    for number in range(300):
        answer = b'{"id":"msg_%d"}' % number
        begun = asked(None)
        assert turns.find(begun, attempt, None, answer) is None
        turns.end(begun, None, attempt, None, answer)
        assert turns.size_bytes <= 100_000
    assert turns.size_bytes > 90_000
    assert turns.find(asked("msg_0"), attempt, None, b'{"id":"x"}') is NOT_FOUND
    assert turns.find(asked("msg_299"), attempt, None, b'{"id":"y"}') is None
