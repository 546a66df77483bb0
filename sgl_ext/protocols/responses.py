"""OpenAI's responses: `/v1/responses`."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import orjson

from sgl_ext.protocols.errors import openai_body
from sgl_ext.protocols.prompt_cache import breakpoints_in, read_fields
from sgl_ext.protocols.translation.responses import translate
from sgl_ext.requests.answers import as_object, as_text, parsed, require
from sgl_ext.requests.next_turn import CALL_OUTPUTS
from sgl_ext.requests.protocol import (
    COMMENT,
    Conversation,
    ErrorShape,
    FoundMark,
    Json,
    MarkRules,
    Part,
    Protocol,
    Result,
    ToolForm,
    listed,
)

_HOLD_PARTS = ("content", "output")


def _find_breakpoints(body: Json) -> Iterator[FoundMark]:
    for i, item in enumerate(listed(body.get("input"))):
        for key in _HOLD_PARTS if isinstance(item, dict) else ():
            yield from breakpoints_in(item.get(key), ("input", i, key), f"input.{i}.{key}")


def _join(events: Iterable[bytes]) -> Json:
    """The last event has the whole response."""
    for data in events:
        event = parsed(data)
        if event.get("type") == "response.completed":
            return as_object(event["response"])
        require(event.get("type") != "error")
    raise ValueError("the stream was cut or ended in an error")


def _read(response: Json) -> list[Json]:
    require(response["status"] == "completed" and not response.get("error"))
    items: list[Json] = []
    for item in response["output"]:
        kind = item["type"]
        require(item.get("status") in (None, "completed"))
        sent = {k: v for k, v in item.items() if v is not None and k not in ("id", "status")}
        if kind in CALL_OUTPUTS:
            as_text(item["call_id"])
        elif kind == "message":
            sent["content"] = [part for each in item["content"] if (part := _output_text(each))]
            if not sent["content"]:
                continue
        else:
            require(kind == "reasoning")
        items.append(sent)
    require(any(item["type"] != "reasoning" for item in items))
    return items


def _output_text(part: Json) -> Json | None:
    require(part["type"] == "output_text")
    text = as_text(part["text"])
    return {"type": "output_text", "text": text} if text else None


def _add_results(items: list[Json], results: list[Result]) -> list[Json]:
    outputs: list[Json] = [
        {"type": CALL_OUTPUTS[kind], "call_id": call_id, "output": text}
        for call_id, kind, text in results
    ]
    return items + outputs


def _add_texts(body: Json, parts: list[Json]) -> None:
    texts = [part["text"] for part in parts]
    own = body.get("instructions")
    if texts and (own is None or isinstance(own, str)):
        body["instructions"] = "\n\n".join([*texts, own] if own else texts)


def _write_tool(function: Json, schema: Any) -> Json:
    parameters = {} if schema is None else {"parameters": schema}
    return {"type": "function", **function, **parameters}


def _error_event(message: str, events_sent: int, request_id: str) -> bytes:
    return _late_error({"error": {"message": message}}, events_sent)


def _late_error(document: Json, events_sent: int) -> bytes:
    error = document["error"]
    event: dict[str, Any] = {
        "type": "error",
        "code": error.get("code") or error.get("type") or "server_error",
        "message": error.get("message") or "The request failed.",
        "param": error.get("param"),
        "sequence_number": events_sent,
    }
    return b"event: error\ndata: %b\n\n" % orjson.dumps(event)


_TOOL_FORM = ToolForm(
    lambda tool: tool.get("type") == "function" and "function" not in tool, _write_tool
)
_REFUSED = {
    "conversation": "use previous_response_id",
    "prompt": "send instructions and input themselves",
    "moderation": "nothing here moderates",
}

RESPONSES = Protocol(
    name="responses",
    paths=("/v1/responses",),
    errors=ErrorShape(openai_body, _error_event, _late_error),
    beat=COMMENT,
    prompt=((Part.TOOLS, "tools"), (Part.INSTRUCTIONS, "instructions"), (Part.ITEMS, "input")),
    marks=MarkRules(read_fields=partial(read_fields, _find_breakpoints)),
    conversation=Conversation(
        _join,
        _read,
        _add_results,
        overrides={"store": False},
        stored=("previous_response_id", "conversation"),
    ),
    tool_form=_TOOL_FORM,
    add_texts=_add_texts,
    translate=translate,
    refused=_REFUSED,
    formats=("text.format",),
    recognizes=lambda headers, body: any(
        body.get(field) is not None for field in ("input", "previous_response_id")
    ),
)
COUNT_RESPONSE = Protocol(
    paths=("/v1/responses/input_tokens",),
    errors=RESPONSES.errors,
    prompt=RESPONSES.prompt,
    generates=False,
    tool_form=_TOOL_FORM,
    add_texts=_add_texts,
)
"""An engine counts by a request to `RESPONSES`, whose body is then translated and checked."""
