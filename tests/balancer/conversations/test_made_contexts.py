"""Contexts of what a request's cache marks cover: the rest of the request and the id are enough."""

from __future__ import annotations

import copy
from io import BytesIO
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.conversations.contexts import Block, Made, make_context, unpacked_blocks
from sgl_ext.balancer.conversations.expansion import insert_context
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from sgl_ext.reading.strip import HeaderStrip
from tests.balancer.conftest import Engine, Start

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
HEADER = "x-anthropic-billing-header: cc_version=1; cch={};"


def text(of: str, mark: dict[str, str] | None = None, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": of, **({"cache_control": mark} if mark else {})}


def tool(name: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    marked = {"cache_control": mark} if mark else {}
    return {"name": name, "input_schema": {"type": "object"}, **marked}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def made_of(path: str, body: Any) -> Made:
    made = make_context(of_path(path), body, HeaderStrip())
    assert isinstance(made, Made), made
    return made


def blocks_of(made: Made) -> tuple[Block, ...]:
    return unpacked_blocks(made.registration.items)


def rest_of(body: dict[str, Any], covers: dict[str, int]) -> dict[str, Any]:
    """What a client sends besides the id, by the header of the answer."""
    rest = dict(body)
    turns = "input" if "input" in body else "messages"
    for field, count in covers.items():
        if field != "content":
            rest[field] = rest[field][count:] if isinstance(rest[field], list) else None
        if rest.get(field) in (None, []) and field != turns:
            rest.pop(field, None)
    rest[turns] = rest[turns] or []
    if parts := covers.get("content"):
        first = rest[turns][0]
        rest[turns] = [{**first, "content": first["content"][parts:]}, *rest[turns][1:]]
    return rest


def unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items() if key != "cache_control"}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def expanded(path: str, body: dict[str, Any], made: Made) -> dict[str, Any]:
    """The rest of a body with the context."""
    rest = rest_of(body, made.covers)
    blocks = blocks_of(made)
    before = copy.deepcopy(blocks)
    found, _ = insert_context(of_path(path), {**rest, "context_id": "c"}, blocks, None)
    assert blocks == before, "other requests use them, too"
    found.pop("nvext", None)
    return found


def test_what_marks_cover_becomes_blocks_of_two_layers() -> None:
    body = {
        "model": "m",
        "tools": [tool("read"), tool("write")],
        "system": [text("A"), text("B", HOUR), text("C")],
        "messages": [
            said("user", "One"),
            said("user", [text("Document", MINUTES), text("Question")]),
            said("assistant", "Answer"),
        ],
    }
    before = copy.deepcopy(body)
    made = made_of(MESSAGES, body)
    assert body == before
    assert made.covers == {"tools": 2, "system": 3, "messages": 1, "content": 1}
    assert [(b.id, b.kind, b.layer) for b in blocks_of(made)] == [
        ("stable.tools", "tools", "stable"),
        ("stable.system.0", "system", "stable"),
        ("stable.system.1", "system", "stable"),
        ("project.system.0", "system", "project"),
        ("project.messages", "messages", "project"),
    ]
    found = expanded(MESSAGES, body, made)
    assert unmarked(found) == unmarked(body)
    assert found["system"][1]["cache_control"]["ttl"] == "1h"
    assert found["messages"][1]["content"][0]["cache_control"]["ttl"] == "5m"
    assert not read_marks(of_path(MESSAGES), found, TtlLimits(0, 1e9)).error
    assert rest_of(body, made.covers) == {
        "model": "m",
        "messages": [said("user", [text("Question")]), said("assistant", "Answer")],
    }


def test_a_session_header_changes_neither_the_id_nor_what_the_client_leaves_out() -> None:
    bodies = [
        {"system": [*first, text("Rules", HOUR), text("Now")], "messages": [said("user", "Hi")]}
        for first in ([text(HEADER.format(1))], [text(HEADER.format(2))], [])
    ]
    made = [made_of(MESSAGES, body) for body in bodies]
    assert len({each.registration.about["context_id"] for each in made}) == 1
    assert [each.covers for each in made] == [{"system": 2}, {"system": 2}, {"system": 1}]
    wanted = [text("Rules"), text("Now")]
    for body, each in zip(bodies, made, strict=True):
        assert unmarked(expanded(MESSAGES, body, each))["system"] == wanted


def test_messages_of_chat_completions_stay_as_they_are() -> None:
    body = {
        "tools": [{"type": "function", "function": {"name": "f", "cache_control": HOUR}}],
        "messages": [
            {**said("developer", "Rules"), "cache_control": MINUTES, "name": "x"},
            said("user", "Hi"),
        ],
    }
    made = made_of(CHAT, body)
    assert made.covers == {"tools": 1, "messages": 1}
    found = expanded(CHAT, body, made)
    assert unmarked(found) == unmarked(body)
    assert found["messages"][0]["cache_control"]["ttl"] == "5m"
    parts = [text("Stable", HOUR), text("Changes")]
    body = {"messages": [said("system", parts), said("user", "Hi")]}
    made = made_of(CHAT, body)
    assert made.covers == {"content": 1}
    assert unmarked(expanded(CHAT, body, made)) == unmarked(body)


def test_a_mark_of_the_whole_prompt_covers_the_conversation_of_responses() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}]
    items = [said("user", "Hi"), {"type": "reasoning", "summary": []}]
    body = {
        "tools": tools,
        "instructions": f"{HEADER.format(1)}\nRules",
        "input": items,
        "prompt_cache_retention": "24h",
    }
    made = made_of(RESPONSES, body)
    assert made.covers == {"tools": 2, "instructions": 1, "input": 2}
    more = [said("user", "Go on")]
    rest = {**rest_of(body, made.covers), "input": more}
    found, _ = insert_context(of_path(RESPONSES), rest, blocks_of(made), None)
    assert found["nvext"]["cache_control"]["ttl"] == "1h"
    assert (found["tools"], found["instructions"]) == (tools, "Rules")
    assert found["input"] == [*items, *more]
    made = made_of(RESPONSES, {"input": "Hi", "prompt_cache_retention": "24h"})
    found, _ = insert_context(of_path(RESPONSES), {"input": "So"}, blocks_of(made), None)
    assert found["input"] == [said("user", "Hi"), said("user", "So")]


@pytest.mark.parametrize(
    ("path", "more", "covers"),
    [
        (CHAT, {"nvext": {"cache_control": MINUTES}}, {"messages": 2}),
        (CHAT, {"prompt_cache_options": {"mode": "implicit"}}, {"messages": 2}),
        (CHAT, {"prompt_cache_options": {"mode": "explicit"}}, {"messages": 1, "content": 1}),
        (CHAT, {"kv_hints": {"actions": [{"action_type": "kv.pin", "payload": {}}]}}, None),
        (RESPONSES, {"prompt_cache_options": {"mode": "explicit"}}, {"input": 1, "content": 1}),
    ],
)
def test_every_form_of_marks_counts(path: str, more: Any, covers: dict[str, int] | None) -> None:
    kind = "text" if path == CHAT else "input_text"
    parts = [text("A", kind=kind), text("B", kind=kind)]
    if "mode" in str(more):
        parts[0]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    turns = [said("system", "Rules"), said("user", parts)]
    body = {"messages" if path == CHAT else "input": turns, **more}
    if path == RESPONSES:
        output = {"type": "function_call_output", "call_id": "c", "output": parts}
        items = {**body, "input": [turns[0], output, turns[1]]}
        items["input"][2] = said("user", "Go on")
        assert made_of(path, items).covers == {"input": 1}
    made = made_of(path, body)
    assert made.covers == (covers or {"messages": 2})
    assert not any("breakpoint" in str(block.content) for block in blocks_of(made))


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (MESSAGES, {"messages": [said("user", "Hi")]}, "no_marks"),
        (MESSAGES, [], "no_marks"),
        ("/generate", {"text": "Hi", "nvext": {"cache_control": HOUR}}, "no_marks"),
        ("/v1/messages/count_tokens", {"system": [text("A", HOUR)]}, "no_marks"),
        (MESSAGES, {"system": [text("A", {"type": "wrong"})]}, "no_marks"),
        (MESSAGES, {"system": [{"type": "image", "cache_control": HOUR}]}, "nothing_covered"),
        (MESSAGES, {"system": [text(HEADER.format(1), HOUR)]}, "nothing_covered"),
        (MESSAGES, {"system": [text("A")] * 64 + [text("B", HOUR)]}, "not_a_context"),
        (RESPONSES, {"nvext": {"cache_control": HOUR}}, "nothing_covered"),
        (MESSAGES, {"tools": 7, "messages": [7], "cache_control": HOUR}, "no_marks"),
    ],
)
def test_a_request_without_a_context_says_why(path: str, body: Any, reason: str) -> None:
    assert make_context(of_path(path), body, HeaderStrip()) == reason


_texts = st.text(st.characters(categories=("L",)), min_size=1, max_size=5)
_controls = st.sampled_from([None, None, MINUTES, HOUR])
_parts = st.builds(text, _texts, _controls)
_contents = _texts | st.lists(_parts, min_size=1, max_size=3)
_turns = st.builds(said, st.sampled_from(["user", "assistant"]), _contents)
_tools = st.lists(st.builds(tool, _texts, _controls), max_size=3)


@given(
    tools=_tools,
    system=st.none() | _texts | st.lists(_parts, min_size=1, max_size=3),
    turns=st.lists(_turns, max_size=4),
    whole=_controls,
)
def test_the_rest_and_the_context_are_the_whole_request_to_messages(
    tools: list[Any], system: Any, turns: list[Any], whole: Any
) -> None:
    body = {"messages": turns, **({"tools": tools} if tools else {})}
    body |= {"system": system} if system else {}
    body |= {"cache_control": whole} if whole else {}
    made = make_context(of_path(MESSAGES), body, HeaderStrip())
    if isinstance(made, str):
        return
    found = expanded(MESSAGES, body, made)
    assert lists(unmarked(found)) == lists(unmarked(body))
    assert not any("cache_control" in orjson.dumps(b.content).decode() for b in blocks_of(made))
    assert made_of(MESSAGES, body).registration == made.registration


@given(tools=_tools, turns=st.lists(_turns, min_size=1, max_size=4), whole=_controls)
def test_the_rest_and_the_context_are_the_whole_request_to_chat(
    tools: list[Any], turns: list[Any], whole: Any
) -> None:
    first = said("system", turns[0]["content"])
    offered = [
        {"type": "function", "function": {"name": each["name"]}, **marks(each)} for each in tools
    ]
    body: dict[str, Any] = {"messages": [first, *turns], **({"tools": offered} if tools else {})}
    body |= {"nvext": {"cache_control": whole}} if whole else {}
    made = make_context(of_path(CHAT), body, HeaderStrip())
    if isinstance(made, str):
        return
    found = expanded(CHAT, body, made)
    body.pop("nvext", None)
    assert unmarked(found) == unmarked(body)


def marks(holder: dict[str, Any]) -> dict[str, Any]:
    return {key: holder[key] for key in ("cache_control",) if key in holder}


def lists(body: dict[str, Any]) -> dict[str, Any]:
    """Texts as the lists of one block that SGLang reads in the same way."""
    body = dict(body)
    if isinstance(body.get("system"), str):
        body["system"] = [text(body["system"])]
    body["messages"] = [
        {**m, "content": [text(m["content"])]} if isinstance(m["content"], str) else m
        for m in body["messages"]
    ]
    return body


# Requests.

MARKED = {
    MESSAGES: {
        "tools": [tool("read")],
        "system": [text("Rules. " * 50, HOUR)],
        "messages": [said("user", "Hi")],
    },
    CHAT: {
        "messages": [said("system", [text("Rules. " * 50, HOUR)]), said("user", "Hi")],
    },
    RESPONSES: {"instructions": "Rules. " * 50, "input": "Hi", "prompt_cache_retention": "24h"},
}
WANTED = {"x-sgl-ext-context": "create"}


@pytest.mark.parametrize("path", MARKED)
async def test_an_answer_names_the_context_and_the_next_request_is_the_whole_one(
    start: Start, path: str
) -> None:
    engine = Engine("a")
    client = await start(engine)
    body = MARKED[path]
    plain = await client.post(path, json=body)
    assert "x-sgl-ext-context" not in plain.headers
    answers = [await client.post(path, json=body, headers=WANTED) for _ in range(2)]
    ids = {answer.headers["x-sgl-ext-context"] for answer in answers}
    assert len(ids) == 1
    stated = answers[0].headers["x-sgl-ext-context-covers"].split(", ")
    covers = {part.split("=")[0]: int(part.split("=")[1]) for part in stated}
    rest = rest_of(body, covers)
    await client.post(path, json={**rest, "context_id": ids.pop()})
    whole, again = (orjson.loads(engine.seen[at][1]) for at in (0, -1))
    if path == RESPONSES:
        again.pop("nvext")
        whole["input"] = [said("user", "Hi")]
    assert unmarked(again) == unmarked(whole)
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_contexts_made_total{result="made"} 1.0' in page
    assert 'sgl_ext_contexts_made_total{result="renewed"} 1.0' in page
    saved = len(engine.seen[-1][1]) - len(orjson.dumps({**rest, "context_id": "ctx_" + "0" * 40}))
    line = next(each for each in page.splitlines() if each.startswith("sgl_ext_saved_bytes_total "))
    assert float(line.split()[1]) == pytest.approx(saved, abs=10)


async def test_volatile_lines_are_moved_as_in_the_whole_request(start: Start) -> None:
    """The balancer reads both requests as the engine will, after it moved the lines."""
    client = await start(Engine("a"), move_volatile_lines=True)
    rules = "You are an agent.\nToday's date is 2026-11-22.\nBe brief. "
    own = text("Current date: 2026-11-23\nBe kind.")
    body = {"model": "m", "system": [text(rules * 20, HOUR), own], "messages": [said("user", "Hi")]}
    answer = await client.post(MESSAGES, json=body, headers=WANTED)
    rest = {**body, "system": [own], "context_id": answer.headers["x-sgl-ext-context"]}
    whole = {**body, "system": [text(rules * 20, HOUR), own]}
    explained = [
        await (await client.post("/sgl_ext/explain/v1/messages", json=each)).json()
        for each in (whole, rest)
    ]
    assert explained[0] == explained[1]
    assert explained[0]["segments"] > 1


async def test_an_answer_without_a_context_says_why(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start(Engine("a"))

    async def skipped(body: Any, value: str = "create") -> str | None:
        answer = await client.post(MESSAGES, json=body, headers={"x-sgl-ext-context": value})
        assert answer.status == 200, await answer.text()
        assert "x-sgl-ext-context" not in answer.headers
        return answer.headers.get("x-sgl-ext-context-skipped")

    assert await skipped({"messages": [said("user", "Hi")]}) == "no_marks"
    marked = MARKED[MESSAGES]
    answer = await client.post(MESSAGES, json=marked, headers={"x-sgl-ext-context": "yes"})
    assert answer.status == 400
    error = (await answer.json())["error"]["message"]
    assert error == "x-sgl-ext-context: must be 'create', not 'yes'"
    answer = await client.post(MESSAGES, json=marked, headers=WANTED)
    named = {**marked, "context_id": answer.headers["x-sgl-ext-context"]}
    assert await skipped(named) == "names_stored"

    async def fails(*_: object) -> None:
        raise StoreFailed("away")

    target = "sgl_ext.balancer.store.sqlite.SqliteDocuments.get"
    monkeypatch.setattr(target, fails)
    assert await skipped(marked) == "unavailable"


async def test_a_large_request_makes_a_context_in_another_process(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    body = {"system": [text("Long. " * 500_000, HOUR)], "messages": [said("user", "Hi")]}
    sent = BytesIO(orjson.dumps(body))
    headers = {**WANTED, "content-type": "application/json"}
    answer = await client.post(MESSAGES, data=sent, headers=headers)
    assert answer.status == 200
    id = answer.headers["x-sgl-ext-context"]
    assert id == made_of(MESSAGES, body).registration.about["context_id"]
    rest = {"messages": body["messages"], "context_id": id}
    assert (await client.post(MESSAGES, json=rest)).status == 200
    assert unmarked(orjson.loads(engine.seen[-1][1])) == unmarked(body)
