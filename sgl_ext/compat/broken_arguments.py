"""Arguments of earlier calls that are no object, in the prompt as the model wrote them.

A model can write arguments that are cut off, a list, or no JSON at all. SGLang gives templates
objects only, so such arguments reach one as {"input": text} (`object_of` in reading/rewriting.py).
A template that prints arguments as JSON would show the model its own text in quotes. So the object
is one that has the text with it:

    written        {"path": "a.md
    object         {"input": "{\\"path\\": \\"a.md"}
    as JSON        {"path": "a.md
    by parameter   <parameter=input>{"path": "a.md</parameter>

    fault     arguments that are no object end in a 400
    hooks     groups "templates" and "host caches"
    test      tests/compat/test_broken_arguments.py
    upstream  docs/upstream/take-broken-arguments-back.patch
    ends with a version that shows arguments as they were written
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sgl_ext.reading.protocol import Json, objects
from sgl_ext.reading.rewriting import NO_OBJECT, is_object, text_of


class WrittenArguments(dict[str, Any]):
    """The object for arguments that are no object. text: what the model wrote."""

    def __init__(self, text: str) -> None:
        super().__init__({NO_OBJECT: text})
        self.text = text


def with_written_arguments(messages: list[Json], body: Any) -> list[Json]:
    """Messages for a template, in which the objects for broken arguments have their texts.

    body: the request's, as its client sent it.
    """
    if not any(map(_may_be_broken, _calls(messages))):
        return messages
    written = dict(_broken_arguments(body))
    return [_with_texts(message, written) for message in messages] if written else messages


def _calls(messages: list[Json]) -> Iterator[Json]:
    for message in messages:
        yield from message.get("tool_calls") or ()


def _may_be_broken(call: Json) -> bool:
    arguments = call["function"].get("arguments")
    return type(arguments) is dict and len(arguments) == 1 and NO_OBJECT in arguments


def _with_texts(message: Json, written: Mapping[str, str]) -> Json:
    calls = message.get("tool_calls")
    if not calls or not any(map(_may_be_broken, calls)):
        return message
    return {**message, "tool_calls": [_with_text(call, written) for call in calls]}


def _with_text(call: Json, written: Mapping[str, str]) -> Json:
    if not _may_be_broken(call):
        return call
    function = call["function"]
    text = written.get(text_of(function["arguments"]))
    if text is None:
        return call
    return {**call, "function": {**function, "arguments": WrittenArguments(text)}}


def _broken_arguments(body: Any) -> Iterator[tuple[str, str]]:
    """The arguments of a body's calls that are no object: the object for them as JSON, and the
    text that the model wrote."""
    if not isinstance(body, dict):
        return
    for message in objects(body.get("messages")):
        functions = [call.get("function") for call in objects(message.get("tool_calls"))]
        for function in objects([message.get("function_call"), *functions]):
            yield from _if_broken(function.get("arguments"))
        for block in objects(message.get("content")):
            if block.get("type") == "tool_use":
                yield from _if_broken(_input_as_written(block, body))
    for item in objects(body.get("input")):
        if item.get("type") == "function_call":
            yield from _if_broken(item.get("arguments"))


def _if_broken(arguments: Any) -> Iterator[tuple[str, str]]:
    if isinstance(arguments, str) and not is_object(arguments):
        yield text_of(arguments), arguments


def _input_as_written(block: Json, body: Json) -> Any:
    """A call's input; its text if a whole answer had to put it into an object."""
    given = block.get("input")
    if not isinstance(given, dict) or given.keys() != {NO_OBJECT}:
        return given
    tools = objects(body.get("tools"))
    tool = next((tool for tool in tools if tool.get("name") == block.get("name")), {})
    schema = tool.get("input_schema")
    parameters = schema.get("properties") if isinstance(schema, dict) else None
    if not parameters or NO_OBJECT in parameters:  # it may be the tool's own parameter
        return given
    text = given[NO_OBJECT]
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
