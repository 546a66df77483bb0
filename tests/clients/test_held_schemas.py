"""In every protocol, whole and streamed: a tool that is in no grammar refuses no request, and a
schema of the answer or of a strict tool is held, or refused with its place."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node

pytestmark = pytest.mark.wrong_requests
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_A = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
_B = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}
UNHELD = {
    "pattern": {"type": "string", "pattern": "^[\\p{L}\\p{N}_-]+$"},
    "any character": {"type": "string", "pattern": "^[^]$"},
    "allOf": {"allOf": [_A, {"minProperties": 2}]},
    "oneOf": {"oneOf": [_A, {**_A, "title": "the same"}]},
    "not": {"not": {"type": "null"}},
    "if": {"if": _A, "then": _B},
    "multipleOf": {"type": "integer", "multipleOf": 3},
    "draft 4": {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
    "draft 7": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
    "itself": {"$ref": "#"},
    "no schema": {"type": 5},
}
HELD = {
    "named group": {"type": "string", "pattern": "^(?<year>\\d{4})$"},
    "allOf": {"allOf": [_A, _B]},
    "oneOf": {"oneOf": [_A, {"type": "null"}]},
    "a reference": {"anyOf": [{"$ref": "#"}, {"type": "boolean"}]},
}


def inside(schema: Any) -> Any:
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
    }


class Sender:
    def __init__(self, node: Node, model: str) -> None:
        self._node, self._model = node, model

    def post(self, protocol: str, stream: bool, **fields: Any) -> requests.Response:
        asked = [{"role": "user", "content": "Fill it in."}]
        sent: dict[str, dict[str, Any]] = {
            "chat": {"max_tokens": 8, "messages": asked},
            "messages": {"max_tokens": 8, "messages": asked},
            "responses": {"max_output_tokens": 8, "input": "Fill it in.", "store": False},
        }
        sent["chat"]["chat_template_kwargs"] = {"enable_thinking": False}
        sent["messages"]["thinking"] = {"type": "disabled"}
        sent["responses"]["reasoning"] = {"effort": "none"}
        body = {"model": self._model, "stream": stream, **sent[protocol], **fields}
        return self._node.post(PATHS[protocol], body)

    def tool(
        self, protocol: str, schema: Any, *, stream: bool, strict: bool, forced: bool
    ) -> requests.Response:
        facts: dict[str, Any] = {"name": "f"} | ({"strict": True} if strict else {})
        choices: dict[str, Any] = {
            "chat": {"type": "function", "function": {"name": "f"}},
            "messages": {"type": "tool", "name": "f"},
            "responses": {"type": "function", "name": "f"},
        }
        if protocol == "chat":
            tool = {"type": "function", "function": {**facts, "parameters": schema}}
        elif protocol == "messages":
            tool = {**facts, "input_schema": schema}
        else:
            tool = {"type": "function", **facts, "parameters": schema}
        chosen = {"tool_choice": choices[protocol]} if forced else {}
        return self.post(protocol, stream, tools=[tool], **chosen)

    def answer(self, protocol: str, schema: Any, *, stream: bool) -> requests.Response:
        if protocol == "chat":
            named = {"name": "n", "strict": True, "schema": schema}
            form = {"type": "json_schema", "json_schema": named}
            return self.post(protocol, stream, response_format=form)
        form = {"type": "json_schema", "schema": schema}
        if protocol == "messages":
            return self.post(protocol, stream, output_config={"format": form})
        return self.post(protocol, stream, text={"format": form | {"name": "n", "strict": True}})


@pytest.fixture
def sender(node: Node, served_model: str) -> Sender:
    return Sender(node, served_model)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PATHS)
def test_a_tool_that_is_not_strict_refuses_no_request(
    sender: Sender, protocol: str, stream: bool
) -> None:
    for name, schema in (UNHELD | HELD).items():
        for forced in (False, True):
            answer = sender.tool(
                protocol, inside(schema), stream=stream, strict=False, forced=forced
            )
            assert answer.status_code == 200, (name, forced, answer.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PATHS)
def test_what_is_promised_is_held_or_refused(sender: Sender, protocol: str, stream: bool) -> None:
    fields = {"chat": "response_format", "messages": "output_config.format"}
    for name, schema in UNHELD.items():
        wanted = inside(schema)
        answers = [
            ("tools", sender.tool(protocol, wanted, stream=stream, strict=True, forced=False)),
            ("tools", sender.tool(protocol, wanted, stream=stream, strict=True, forced=True)),
            (
                fields.get(protocol, "text.format"),
                sender.answer(protocol, wanted, stream=stream),
            ),
        ]
        for field, answer in answers:
            assert answer.status_code == 400, (name, field, answer.text)
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{field}: JSON Schema at #"), (name, message)
    for name, schema in HELD.items():
        strict = sender.tool(protocol, inside(schema), stream=stream, strict=True, forced=True)
        assert strict.status_code == 200, (name, strict.text)
        made = sender.answer(protocol, inside(schema), stream=stream)
        assert made.status_code == 200, (name, made.text)
