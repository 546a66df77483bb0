"""Arguments that are no object are in the next prompt as the model wrote them."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.compat.broken_arguments import with_written_arguments
from tests.compat.front_end import CHAT, MESSAGES, RESPONSES
from tests.compat.test_template_fitting import FAMILIES, front_end

CUT = '{"key": "tosquin \\"velm'
WRITTEN = [CUT, '["tosquin", 7]', "tosquin velm", '"tosquin"', "7"]
NOTHING = ["", " \n", "null"]
_SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}


def body_of(path: str, arguments: Any) -> dict[str, Any]:
    """A body in which a call with these arguments comes back."""
    asked, said = {"role": "user", "content": "Look."}, "It was no JSON."
    if path == CHAT:
        function = {"name": "look", "arguments": arguments}
        calls = [{"id": "call0a0a0", "type": "function", "function": function}]
        answer = {"role": "assistant", "content": None, "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": "call0a0a0", "content": said}
        tool: dict[str, Any] = {"name": "look", "parameters": _SCHEMA}
        tools = [{"type": "function", "function": tool}]
        return {"model": "m", "messages": [asked, answer, result], "tools": tools}
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "c", "name": "look", "input": arguments}
        block = {"type": "tool_result", "tool_use_id": "c", "content": said}
        messages = [
            asked,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [block]},
        ]
        tool = {"name": "look", "input_schema": _SCHEMA}
        return {"model": "m", "max_tokens": 9, "messages": messages, "tools": [tool]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": said}
    tool = {"type": "function", "name": "look", "parameters": _SCHEMA}
    return {"model": "m", "input": [asked, call, output], "tools": [tool]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_the_prompt_has_what_the_model_wrote(family: str, path: str) -> None:
    serving = front_end(family)
    for written in WRITTEN:
        prompt = serving.prompt(path, body_of(path, written))
        assert written in prompt
    empty = serving.prompt(path, body_of(path, {} if path == MESSAGES else "{}"))
    for written in NOTHING:
        assert serving.prompt(path, body_of(path, written)) == empty


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_whole_answer_of_messages_put_into_an_object_is_the_same(family: str) -> None:
    serving = front_end(family)
    sent_back = serving.prompt(MESSAGES, body_of(MESSAGES, {"input": CUT}))
    assert sent_back == serving.prompt(MESSAGES, body_of(MESSAGES, CUT))


def test_a_tools_own_input_and_arguments_that_are_an_object_stay() -> None:
    call = {"function": {"name": "patch", "arguments": {"input": "-a\n+b"}}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    item = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "-a\n+b"}
    assert with_written_arguments(messages, {"input": [item]}) is messages
    other = {"function": {"name": "look", "arguments": {"key": 1}}}
    messages = [{"role": "assistant", "tool_calls": [other]}]
    assert with_written_arguments(messages, body_of(CHAT, CUT)) is messages


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_needs_no_description(family: str) -> None:
    prompt = front_end(family).prompt(CHAT, body_of(CHAT, "{}"))
    assert "Look." in prompt
    if family != "deepseek_v31":  # it shows no tools
        assert "key" in prompt
