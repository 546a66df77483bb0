"""The Python SDKs through a tool loop of three turns: a call, two at once, an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.lib.tools import BetaFunctionTool
from sgl_ext_cpu.node import Node

from tests.clients.agents import Turn, assert_read_from_cache, prompt_tokens, read_tokens
from tests.clients.scripts import SDK_ANSWER, SDK_CALLS, SDK_PROMPT, SDK_THOUGHT, SDK_WORD

_TURNS = 3
_TOKENS = 400
_RESULT = "Nothing of note. " * 20
_ARGUMENTS = {
    "read_file": {"path": {"type": "string"}},
    "search": {"text": {"type": "string"}, "within": {"type": "object"}},
    "patch": {"input": {"type": "string"}},
}
_SCHEMAS = {
    name: {"type": "object", "properties": properties} for name, properties in _ARGUMENTS.items()
}
is_streamed = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def claude(scripted: Node, api_keys: dict[str, str]) -> Iterator[anthropic.Anthropic]:
    key = api_keys["sdks"]
    with anthropic.Anthropic(base_url=scripted.url, api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(scripted: Node, api_keys: dict[str, str]) -> Iterator[openai.OpenAI]:
    key, url = api_keys["sdks"], f"{scripted.url}/v1"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client


@is_streamed
def test_messages(claude: anthropic.Anthropic, is_streamed: bool) -> None:
    def ask() -> anthropic.types.Message:
        request: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": _TOKENS,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": n, "input_schema": schema} for n, schema in _SCHEMAS.items()],
            "messages": messages,
        }
        if not is_streamed:
            return claude.messages.create(**request)
        with claude.messages.stream(**request) as stream:
            return stream.get_final_message()

    messages: list[Any] = [{"role": "user", "content": SDK_PROMPT}]
    turns = []
    for calls in (*SDK_CALLS, []):
        answer = ask()
        usage = answer.usage.model_dump()
        turns.append(Turn(prompt_tokens(usage), read_tokens(usage)))
        used = [block for block in answer.content if block.type == "tool_use"]
        assert [(block.name, block.input) for block in used] == calls
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        if len(turns) == 1:
            assert answer.content[0].thinking.strip() == SDK_THOUGHT
            assert answer.content[0].signature
            assert answer.content[1].text.strip() == SDK_WORD
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": _RESULT} for block in used
        ]
        messages.append({"role": "user", "content": results})
    assert answer.content[-1].text.strip() == SDK_ANSWER
    assert_read_from_cache(turns, requests=_TURNS)


@is_streamed
def test_a_tool_runner_sends_only_new_turns(claude: anthropic.Anthropic, is_streamed: bool) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    def tool(name: str) -> Any:
        def call(**given: Any) -> str:
            made.append((name, given))
            return _RESULT

        return BetaFunctionTool(call, name=name, description=name, input_schema=_SCHEMAS[name])

    requests: list[Any] = []
    claude._client.event_hooks["request"].append(lambda sent: requests.append(sent.read()))
    runner = claude.beta.messages.tool_runner(
        model="tiny",
        max_tokens=_TOKENS,
        thinking={"type": "adaptive"},
        tools=[tool(name) for name in _SCHEMAS],
        messages=[{"role": "user", "content": SDK_PROMPT}],
        stream=is_streamed,
    )
    turns = []
    for each in runner:
        answer = each.get_final_message() if is_streamed else each
        usage = answer.usage.model_dump()
        turns.append(Turn(prompt_tokens(usage), read_tokens(usage)))
    assert answer.content[-1].text.strip() == SDK_ANSWER
    assert made == [call for calls in SDK_CALLS for call in calls]
    bodies = list(map(json.loads, requests))
    assert [body["thread"]["type"] for body in bodies] == ["create", *["continue"] * len(SDK_CALLS)]
    assert all(len(body["messages"]) == 1 for body in bodies)
    assert_read_from_cache(turns, requests=_TURNS)


@is_streamed
def test_chat_completions(gpt: openai.OpenAI, is_streamed: bool) -> None:
    functions = [{"name": n, "parameters": schema} for n, schema in _SCHEMAS.items()]
    tools = [{"type": "function", "function": function} for function in functions]
    messages: list[Any] = [{"role": "user", "content": SDK_PROMPT}]
    turns = []
    for calls in (*SDK_CALLS, []):
        request = {"model": "tiny", "max_tokens": _TOKENS, "tools": tools, "messages": messages}
        message, reason, usage = (_streamed_chat if is_streamed else _whole_chat)(
            gpt.chat.completions.create, request
        )
        turns.append(Turn(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        made = message.get("tool_calls") or []
        told = [call["function"] for call in made]
        assert [(call["name"], json.loads(call["arguments"])) for call in told] == calls
        assert reason == ("tool_calls" if calls else "stop")
        if len(turns) == 1:
            assert message["reasoning_content"].strip() == SDK_THOUGHT
            assert message["content"].strip() == SDK_WORD
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": _RESULT} for call in made
        ]
    assert message["content"].strip() == SDK_ANSWER
    assert_read_from_cache(turns, requests=_TURNS)


def _whole_chat(create: Callable[..., Any], request: dict[str, Any]) -> tuple[Any, str, Any]:
    answer = create(**request)
    (choice,) = answer.choices
    return choice.message.model_dump(exclude_none=True), choice.finish_reason, answer.usage


def _streamed_chat(create: Callable[..., Any], request: dict[str, Any]) -> tuple[Any, str, Any]:
    """Puts the message together that the chunks are pieces of."""
    *chunks, last = create(**request, stream=True, stream_options={"include_usage": True})
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for part in ("content", "reasoning_content"):
            message[part] += delta.get(part, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                function = {"name": "", "arguments": ""}
                calls.append({"id": call["id"], "type": "function", "function": function})
            for part, text in call["function"].items():
                calls[call["index"]]["function"][part] += text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    return {**message, "tool_calls": calls or None}, reasons[-1], last.usage


@is_streamed
def test_responses(gpt: openai.OpenAI, scripted_model: str, is_streamed: bool) -> None:
    """`patch` is a custom tool here, whose input is text, as Codex's `apply_patch` is."""
    functions = {name: schema for name, schema in _SCHEMAS.items() if name != "patch"}
    tools: list[Any] = [
        {"type": "function", "name": n, "parameters": schema, "strict": False}
        for n, schema in functions.items()
    ]
    tools.append({"type": "custom", "name": "patch"})
    items: list[Any] = [{"role": "user", "content": SDK_PROMPT}]
    turns = []
    for calls in (*SDK_CALLS, []):
        answer = gpt.responses.create(
            model=scripted_model, input=items, tools=tools, store=False, stream=is_streamed
        )
        if is_streamed:
            answer = list(answer)[-1].response
        assert answer.status == "completed"
        usage = answer.usage
        turns.append(Turn(usage.input_tokens, usage.input_tokens_details.cached_tokens))
        made = [item for item in answer.output if item.type.endswith("_call")]
        assert [_called(item) for item in made] == calls
        if len(turns) == 1:
            assert answer.output[0].content[0].text.strip() == SDK_THOUGHT
            assert answer.output[1].content[0].text.strip() == SDK_WORD
        items += answer.output
        items += [
            {"type": f"{item.type}_output", "call_id": item.call_id, "output": _RESULT}
            for item in made
        ]
    assert answer.output_text.strip() == SDK_ANSWER
    assert_read_from_cache(turns, requests=_TURNS)


def _called(item: Any) -> tuple[str, Any]:
    if item.type == "custom_tool_call":
        return item.name, {"input": item.input}
    return item.name, json.loads(item.arguments)
