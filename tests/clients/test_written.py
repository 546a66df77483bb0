"""What a model writes reaches a client as written, whole and streamed alike, in every protocol: an
answer that is cut looks cut, words stand where they were written, and what was given comes back."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from sgl_ext_cpu.node import Node

from tests.clients import scripts
from tests.clients.test_calls import events, whole

PROTOCOLS = ("chat", "messages", "responses")
_SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
_TOOLS = ("look_up", "write_file")


class Answer(NamedTuple):
    """said: words, and calls as name and arguments, in order; on chat the words first.

    end: how the protocol says that it ended. states: of the items of a response.
    """

    said: list[Any]
    end: str
    states: tuple[str, ...] = ()

    @property
    def calls(self) -> list[Any]:
        return [each for each in self.said if not isinstance(each, str)]

    @property
    def words(self) -> str:
        return "".join(each for each in self.said if isinstance(each, str))


class Client:
    def __init__(self, node: Node, key: str, model: str) -> None:
        self._node, self._key, self._model = node, key, model

    def ask(
        self, protocol: str, words: str, *, stream: bool, limit: int = 400, schema: Any = None
    ) -> Answer:
        """schema: of the whole answer."""
        sent = {"model": self._model, "temperature": 0}
        asked = [{"role": "user", "content": words}]
        if protocol == "chat":
            tools = [
                {"type": "function", "function": {"name": n, "parameters": _SCHEMA}} for n in _TOOLS
            ]
            sent |= {"max_tokens": limit, "messages": asked, "tools": tools}
            sent |= {"stop": [scripts.STOP]}
            path = "/v1/chat/completions"
        elif protocol == "messages":
            tools = [{"name": name, "input_schema": _SCHEMA} for name in _TOOLS]
            sent |= {"max_tokens": limit, "messages": asked, "tools": tools}
            sent |= {"stop_sequences": [scripts.STOP]}
            path = "/v1/messages"
        else:
            tools = [{"type": "function", "name": name, "parameters": _SCHEMA} for name in _TOOLS]
            tools.append({"type": "custom", "name": "patch"})
            sent |= {"max_output_tokens": limit, "input": words, "tools": tools, "store": False}
            path = "/v1/responses"
        if schema is not None:
            sent |= _format(protocol, schema)
        read = {"chat": _of_chat, "messages": _of_message, "responses": _of_response}[protocol]
        if not stream:
            return read(whole(self._node, self._key, path, sent))
        joined = {"chat": _joined_chat, "messages": _joined_message, "responses": _joined_response}
        return read(joined[protocol](list(events(self._node, self._key, path, sent))))


def _format(protocol: str, schema: Any) -> dict[str, Any]:
    """The fields that ask for JSON of a schema, and no tools."""
    named = {"type": "json_schema", "name": "lines", "schema": schema}
    if protocol == "chat":
        inner = {"name": "lines", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": inner}, "tools": []}
    if protocol == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "tools": []}
    return {"text": {"format": named}, "tools": []}


def _of_chat(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [(call["name"], call["arguments"]) for call in calls]
    words = message["content"] or ""
    return Answer([words, *said] if words else list(said), choice["finish_reason"])


def _joined_chat(given: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    end = None
    for choice in (choice for event in given for choice in event["choices"]):
        message["content"] += choice["delta"].get("content") or ""
        end = choice.get("finish_reason") or end
        for call in choice["delta"].get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            for field in ("name", "arguments"):
                made = message["tool_calls"][call["index"]]["function"]
                made[field] += call["function"].get(field) or ""
    return {"choices": [{"message": message, "finish_reason": end}]}


def _of_message(answer: dict[str, Any]) -> Answer:
    said: list[Any] = []
    for block in answer["content"]:
        if block["type"] == "tool_use":
            given = block["input"]
            said.append((block["name"], given if isinstance(given, str) else json.dumps(given)))
        elif block["type"] == "text" and block["text"]:
            said.append(block["text"])
    return Answer(said, answer["stop_reason"])


def _joined_message(given: list[dict[str, Any]]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    end = None
    for event in given:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            content.append(block | {"input": ""} if block["type"] == "tool_use" else block)
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            content[-1]["text"] = content[-1].get("text", "") + delta.get("text", "")
            if "partial_json" in delta:
                content[-1]["input"] += delta["partial_json"]
        elif event["type"] == "message_delta":
            end = event["delta"]["stop_reason"]
    return {"content": content, "stop_reason": end}


def _of_response(answer: dict[str, Any]) -> Answer:
    said = [
        item["content"][0]["text"]
        if item["type"] == "message"
        else (item["name"], item.get("arguments", item.get("input")))
        for item in answer["output"]
        if item["type"] != "reasoning"
    ]
    states = tuple(item.get("status") for item in answer["output"])
    return Answer(said, answer["status"], states)


def _joined_response(given: list[dict[str, Any]]) -> dict[str, Any]:
    done = [e["item"].get("status") for e in given if e["type"] == "response.output_item.done"]
    last: dict[str, Any] = given[-1]["response"]
    assert done == [item.get("status") for item in last["output"]]
    return last


@pytest.fixture
def client(scripted: Node, api_keys: dict[str, str], scripted_model: str) -> Client:
    return Client(scripted, api_keys["sdks"], scripted_model)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("limit", [20, 40, 41, 42, 70])
def test_a_call_that_is_cut_off_gets_no_end(client: Client, protocol: str, limit: int) -> None:
    written = json.dumps(scripts.LONG_FILE)
    streamed = client.ask(protocol, scripts.CUT, stream=True, limit=limit)
    made = client.ask(protocol, scripts.CUT, stream=False, limit=limit)
    end = {"chat": "length", "messages": "max_tokens", "responses": "incomplete"}[protocol]
    assert streamed.end == made.end == end
    ((name, arguments),) = streamed.calls
    assert name == "write_file"
    assert written.startswith(arguments)
    assert arguments != written
    if protocol == "messages":  # its input is an object
        assert made.calls == [(name, json.dumps({"input": arguments} if arguments else {}))]
    else:
        assert made == streamed
    assert not streamed.words
    if protocol == "responses":
        assert streamed.states[-1] == "incomplete"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("limit", [7, 9, 11])
def test_a_call_that_is_cut_off_in_its_name_is_words(
    client: Client, protocol: str, limit: int
) -> None:
    begin = '<tool_call>\n{"name": "write_file"'
    streamed = client.ask(protocol, scripts.CUT, stream=True, limit=limit)
    made = client.ask(protocol, scripts.CUT, stream=False, limit=limit)
    assert streamed == made
    assert not streamed.calls
    assert streamed.words.strip()
    assert begin.startswith(streamed.words.strip())
    assert streamed.end == {"chat": "length", "messages": "max_tokens"}.get(protocol, "incomplete")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("limit", [8, 20, 33])
def test_json_of_a_schema_that_is_cut_off_gets_no_end(
    client: Client, protocol: str, limit: int
) -> None:
    written = json.dumps(scripts.LONG_LINES)
    schema = scripts.LONG_LINES_SCHEMA
    streamed = client.ask(protocol, scripts.LINES, stream=True, limit=limit, schema=schema)
    made = client.ask(protocol, scripts.LINES, stream=False, limit=limit, schema=schema)
    assert streamed == made
    assert not streamed.calls
    words = streamed.words.strip()
    assert words not in ("", written)
    assert written.startswith(words)
    assert streamed.end == {"chat": "length", "messages": "max_tokens"}.get(protocol, "incomplete")
    if protocol == "responses":
        assert streamed.states[-1] == "incomplete"
    whole = client.ask(protocol, scripts.LINES, stream=True, schema=schema)
    assert json.loads(whole.words) == scripts.LONG_LINES


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_a_stop_sequence_inside_of_a_call_does_not_end_it(client: Client, protocol: str) -> None:
    answers = [client.ask(protocol, scripts.STOPPED, stream=each) for each in (True, False)]
    for answer in answers:
        assert answer.end == ("stop" if protocol == "chat" else "stop_sequence")
        ((_, arguments),) = answer.calls
        assert "one two " in arguments
        assert "three" not in arguments
    assert answers[0].calls[0][1] == '{"path": "s.txt", "body": "one two '


def test_thinking_and_a_custom_call_that_are_cut_off_are_incomplete(client: Client) -> None:
    for words, limit in ((scripts.THOUGHT, 12), (scripts.PATCH, 40)):
        streamed = client.ask("responses", words, stream=True, limit=limit)
        assert streamed == client.ask("responses", words, stream=False, limit=limit)
        assert streamed.end == "incomplete"
        if words == scripts.THOUGHT:
            assert streamed.states == ("incomplete",)
        else:
            ((name, given),) = streamed.calls
            assert name == "patch"
            assert ("x " * 60).startswith(given)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_words_stand_between_the_calls(client: Client, protocol: str) -> None:
    streamed = client.ask(protocol, scripts.BETWEEN, stream=True)
    made = client.ask(protocol, scripts.BETWEEN, stream=False)
    assert made == streamed
    assert streamed.calls == [("look_up", '{"key": "x"}'), ("look_up", '{"key": "y"}')]
    assert streamed.words.lstrip() == "One.\n\nBetween. \u00fc\nAfter."
    if protocol != "chat":
        order = ["words" if isinstance(each, str) else "call" for each in streamed.said]
        assert order == ["words", "call", "words", "call", "words"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numbers_that_json_has_not_arrive(client: Client, protocol: str) -> None:
    streamed = client.ask(protocol, scripts.NUMBERS, stream=True)
    assert streamed.calls == [("look_up", scripts.ODD_NUMBERS)]
    ((_, arguments),) = client.ask(protocol, scripts.NUMBERS, stream=False).calls
    if protocol != "messages":
        assert arguments == scripts.ODD_NUMBERS
    else:
        numbers = ["-Infinity", "1e999", 12345678901234567890123, 1.5]
        assert json.loads(arguments) == {"key": "NaN", "of": numbers}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("arguments", ["", scripts.BROKEN_ARGUMENTS, "[1]", "look", "null", "7"])
def test_broken_arguments_come_back(
    scripted: Node, client: Client, api_keys: dict[str, str], arguments: str, stream: bool
) -> None:
    """In the next turn of a conversation, with the prompt of what the model wrote, or of {}."""
    if arguments == scripts.BROKEN_ARGUMENTS:
        ((_, given),) = client.ask("chat", scripts.BROKEN, stream=stream).calls
        assert given.rstrip() == arguments.rstrip()

    def prompt_tokens(written: str) -> int:
        function = {"name": "look_up", "arguments": written}
        call = {"id": "c", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "wrong input"},
        ]
        body = {"model": "tiny", "max_tokens": 2, "messages": messages}
        answer = whole(scripted, api_keys["sdks"], "/v1/chat/completions", body)
        tokens: int = answer["usage"]["prompt_tokens"]
        return tokens

    given_tokens = prompt_tokens(arguments)
    if arguments in ("", "null"):
        assert given_tokens == prompt_tokens("{}")
    else:  # what is written twice is in the prompt twice
        assert prompt_tokens(f"{arguments} {arguments}") > given_tokens


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", [scripts.THOUGHT, scripts.BETWEEN, scripts.CUT])
def test_log_probabilities_of_a_chat_are_those_of_its_text(
    scripted: Node, api_keys: dict[str, str], prompt: str, stream: bool
) -> None:
    """Not those of its thinking and its calls."""
    tools = [{"type": "function", "function": {"name": n, "parameters": _SCHEMA}} for n in _TOOLS]
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "tools": tools,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 120,
    }
    path, key = "/v1/chat/completions", api_keys["sdks"]
    if stream:
        choices = [c for e in events(scripted, key, path, body) for c in e["choices"]]
    else:
        choices = whole(scripted, key, path, body)["choices"]
    said = [choice.get("delta") or choice.get("message") for choice in choices]
    text = "".join(each.get("content") or "" for each in said)
    given = [each for c in choices for each in (c.get("logprobs") or {}).get("content") or ()]
    # Tokens of half a character have a mark in its place.
    tokens = re.sub("\ufffd+", "\u00fc", "".join(each["token"] for each in given))
    assert tokens.split() == text.split()
    assert all(len(each["top_logprobs"]) == 2 for each in given)
    assert bool(given) is (prompt != scripts.CUT)
