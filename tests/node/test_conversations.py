"""Stored responses and contexts on real engines: equal prompts, which share the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import openai
import pytest
import requests
from sgl_ext_cpu.node import Node

from tests.waiting import HANG_S, until

_WORDS = ("the", "agent", "reads", "a", "file", "and", "writes", "what", "it", "found")
_fresh = count(1)
_TOOL = {
    "type": "function",
    "name": "read_file",
    "description": "Reads a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def gpt(node: Node) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(node: Node) -> str:
    models = requests.get(f"{node.url}/v1/models", timeout=HANG_S).json()["data"]
    return str(models[0]["id"])


def text(words: int) -> str:
    """A text that no test has sent before."""
    number = next(_fresh)
    source = random.Random(number)
    return f"Text {number}: " + " ".join(source.choice(_WORDS) for _ in range(words))


def read(usage: Any) -> tuple[int, int]:
    """The tokens of the prompt, and those of them that were cached."""
    return usage.input_tokens, usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_turn_by_id_has_the_prompt_of_the_whole_conversation(
    gpt: openai.OpenAI, model: str, effort: str
) -> None:
    usual: dict[str, Any] = {
        "model": model,
        "instructions": text(300),
        "tools": [_TOOL],
        "max_output_tokens": 10,
        "reasoning": {"effort": effort},
    }
    call = {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "Nothing is in it."}
    entered: list[Any] = [{"role": "user", "content": text(30)}, call, result]
    first = gpt.responses.create(**usual, input=entered)
    assert first.output
    more: list[Any] = [{"role": "user", "content": "Go on."}]
    second = gpt.responses.create(**usual, input=more, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt, cached = read(second.usage)
    assert cached >= 0.95 * prompt
    whole = [*entered, *(item.model_dump(exclude_none=True) for item in first.output), *more]
    explicit = gpt.responses.create(**usual, input=whole, store=False)
    assert read(explicit.usage)[0] == prompt
    assert read(explicit.usage)[1] >= prompt - 1
    streamed = list(
        gpt.responses.create(**usual, input=more, previous_response_id=second.id, stream=True)
    )
    last = streamed[-1].response
    assert last.previous_response_id == second.id
    assert read(last.usage)[0] > prompt
    assert read(last.usage)[1] >= 0.95 * read(last.usage)[0]
    assert gpt.responses.retrieve(last.id).output == last.output
    items = list(gpt.responses.input_items.list(last.id, order="asc", limit=100))
    assert len(items) == len(whole) + len(second.output) + 1
    gpt.responses.delete(last.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(last.id)


def test_an_unknown_response_is_openais_bad_request(gpt: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="'resp_1' not found") as raised:
        gpt.responses.create(model=model, input="Hello", previous_response_id="resp_1")
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"


def test_a_context_has_the_prompt_of_its_content(node: Node, model: str) -> None:
    rules, notes = text(300), text(200)
    blocks = [
        {"id": "tools", "kind": "tools", "layer": "stable", "content": [_TOOL]},
        {"id": "rules", "layer": "stable", "content": rules},
        {"id": "notes", "kind": "document", "layer": "project", "content": notes},
    ]
    id = node.post("/v1/contexts", {"blocks": blocks}).json()["context_id"]
    function = {key: _TOOL[key] for key in ("name", "description", "parameters")}
    anthropics = {"name": "read_file", "description": "Reads a file."}
    parts = [{"type": "text", "text": each} for each in (rules, notes)]
    user = [{"role": "user", "content": "Hello"}]
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "/v1/messages": (
            {"model": model, "max_tokens": 1, "messages": user},
            {"tools": [{**anthropics, "input_schema": _TOOL["parameters"]}], "system": parts},
        ),
        "/v1/chat/completions": (
            {"model": model, "max_tokens": 1, "messages": user, **quiet},
            {
                "tools": [{"type": "function", "function": function}],
                "messages": [{"role": "system", "content": parts}, *user],
            },
        ),
        "/v1/responses": (
            {"model": model, "max_output_tokens": 3, "input": "Hello", **quiet},
            {"tools": [_TOOL], "instructions": f"{rules}\n\n{notes}"},
        ),
    }
    node.flush()
    for path, (rest, content) in asked.items():
        (first, _), (again, cached) = (
            used(node.post(path, rest | more)) for more in ({"context_id": id}, content)
        )
        assert first == again
        assert cached >= first - 1, path
        (prompt, cached) = used(node.post(path, rest | {"nvext": {"context_id": id}}))
        assert (prompt, cached >= prompt - 1) == (first, True)


_HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_FUNCTION = {key: _TOOL[key] for key in ("name", "description", "parameters")}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_what_marks_cover_and_the_rest_have_the_whole_prompt(
    node: Node, model: str, path: str, stream: bool
) -> None:
    """The answer's header says what the context has; the next request leaves out just that."""
    rules, notes = text(200), text(100)
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    user = {"role": "user", "content": [{"type": "text", "text": "What is in it?"}]}
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=7;"}
    block, more = {"type": "text", "text": rules}, {"type": "text", "text": notes}
    whole, rest, covers = {
        "/v1/messages": (
            {
                "tools": [{**_FUNCTION, "input_schema": _TOOL["parameters"]}],
                "system": [header, {**block, **_HOUR}, {"type": "text", "text": "Be brief."}],
                "messages": [{"role": "user", "content": [{**more, **_HOUR}, *user["content"]]}],
            },
            {"messages": [user]},
            "tools=1, system=3, content=1",
        ),
        "/v1/chat/completions": (
            {
                "tools": [{"type": "function", "function": _FUNCTION}],
                "messages": [{"role": "system", "content": [{**block, **_HOUR}, more]}, user],
            },
            {"messages": [{"role": "system", "content": [more]}, user]},
            "tools=1, content=1",
        ),
        "/v1/responses": (
            {
                "tools": [_TOOL],
                "instructions": rules,
                "input": [{"role": "user", "content": notes}],
                "prompt_cache_retention": "24h",
            },
            {"input": []},
            "tools=1, instructions=1, input=1",
        ),
    }[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    usual = {"model": model, limit: 3, "temperature": 0}
    usual |= {} if path == "/v1/messages" else quiet
    headers = {"x-sgl-ext-context": "create"}
    first = node.post(path, usual | whole | {"stream": stream}, headers=headers)
    assert first.ok, first.text
    assert first.headers["x-sgl-ext-context-covers"] == covers
    id = first.headers["x-sgl-ext-context"]
    explicit = node.post(path, usual | whole)
    node.flush()
    named = node.post(path, usual | rest | {"context_id": id})
    again = node.post(path, usual | whole)
    assert used(named)[0] == used(explicit)[0]
    prompt, cached = used(again)
    assert cached >= prompt - 1, "it is the same prompt, token by token"
    assert words(named.json()) == words(explicit.json()) != []


def test_a_context_is_pinned_by_its_layers_and_prefilled_by_its_name(node: Node) -> None:
    stable, project = text(200), text(200)
    blocks = [
        {"id": "rules", "layer": "stable", "content": stable},
        {"id": "notes", "layer": "project", "content": project},
    ]
    id = node.post("/v1/contexts", {"blocks": blocks}).json()["context_id"]
    session = f"context-{next(_fresh)}"
    body = {"model": "tiny", "max_tokens": 1, "context_id": id, "messages": []}
    headers = {"x-sgl-ext-session-id": session, "anthropic-version": "2023-06-01"}
    warmed = node.post("/v1/prefill", body, headers=headers)
    assert warmed.ok, warmed.text
    assert warmed.json()["complete"]
    body["messages"] = [{"role": "user", "content": "Hello"}]
    answer = node.post("/v1/messages", body, headers=headers)
    usage = answer.json()["usage"]
    assert usage["cache_read_input_tokens"] > 400

    def ttls() -> list[float]:
        pins = requests.get(f"{node.url}/v1/pins", timeout=HANG_S).json()["pins"]
        return sorted(pin["ttl_s"] for pin in pins if pin["session"] == session)

    until(lambda: ttls() == [300.0, 3600.0])  # an engine pins after the first token was sent


def words(answer: Any) -> list[str]:
    """All texts of an answer, in any protocol: without ids and signatures."""
    if isinstance(answer, dict):
        keys = ("content", "text", "thinking", "reasoning_content")
        found = [value for key, value in answer.items() if key in keys and isinstance(value, str)]
        return found + [each for value in answer.values() for each in words(value)]
    return [each for part in answer for each in words(part)] if isinstance(answer, list) else []


def used(answer: requests.Response) -> tuple[int, int]:
    """The tokens of the prompt, and those of them that were cached, in any protocol."""
    assert answer.ok, answer.text
    usage = answer.json()["usage"]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    cached = usage.get("cache_read_input_tokens")
    if cached is None:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    created = usage.get("cache_creation_input_tokens") or 0
    return usage["input_tokens"] + cached + created, cached


def test_a_changed_runtime_text_computes_only_what_follows_it(node: Node, model: str) -> None:
    """The tools come after the system text here: the model's template writes them there."""
    tools = [{**_TOOL, "name": f"tool_{k}", "description": text(30)} for k in range(20)]
    blocks = [
        {"id": "tools", "kind": "tools", "layer": "stable", "content": tools},
        {"id": "rules", "layer": "stable", "content": text(200)},
        {"id": "notes", "kind": "document", "layer": "project", "content": text(200)},
        {"id": "now", "layer": "runtime"},
    ]
    id = node.post("/v1/contexts", {"blocks": blocks}).json()["context_id"]
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    user = [{"role": "user", "content": "Hello"}]
    own = "Answer in one line."
    requests_by_path: dict[str, dict[str, Any]] = {
        "/v1/messages": {"max_tokens": 1, "system": own, "messages": user},
        "/v1/chat/completions": {
            "max_tokens": 1,
            "messages": [{"role": "system", "content": own}, *user],
            **quiet,
        },
        "/v1/responses": {"max_output_tokens": 3, "instructions": own, "input": "Hello", **quiet},
    }
    for path, rest in requests_by_path.items():
        session = f"runtime-{next(_fresh)}"
        headers = {"x-sgl-ext-session-id": session}
        for number in range(2):
            texts = {"now": f"{number} is the time. " + text(20)}
            body = {"model": model, "context_id": id, "context_blocks": texts, **rest}
            prompt, cached = used(node.post(path, body, headers=headers))
        assert prompt > 2000
        assert prompt - cached < 100, path
        if path == "/v1/messages":
            until(lambda s=session, p=prompt: lasting_tokens(node, s) > p - 200)  # type: ignore[misc]


def lasting_tokens(node: Node, session: str) -> int:
    """The tokens of the longest pin of a session that lasts an hour; 0 without one."""
    pins = requests.get(f"{node.url}/v1/pins", timeout=HANG_S).json()["pins"]
    mine = [pin for pin in pins if pin["session"] == session and pin["ttl_s"] == 3600]
    return max((int(pin["tokens"]) for pin in mine), default=0)
