"""Anthropic's protocol: `/v1/messages`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from sgl_ext.protocols.translation.anthropic import translate
from sgl_ext.requests.answers import as_object, as_text, parsed, require
from sgl_ext.requests.cache_marks import UNMARKABLE, control_of, marks_in
from sgl_ext.requests.next_turn import result_ids
from sgl_ext.requests.protocol import (
    Conversation,
    ErrorShape,
    FoundMark,
    Json,
    MarkRules,
    Part,
    Place,
    Protocol,
    Result,
    ToolForm,
    listed,
    objects,
)

# Detection

_OWN_BLOCKS = frozenset({"tool_use", "tool_result", "thinking"})


def _recognizes(headers: Mapping[str, str], body: Json) -> bool:
    messages = body.get("messages")
    return isinstance(messages, list) and (
        body.get("system") is not None
        or "anthropic-version" in headers
        or any("input_schema" in tool for tool in objects(body.get("tools")))
        or any(
            block.get("type") in _OWN_BLOCKS
            for message in objects(messages)
            for block in objects(message.get("content"))
        )
    )


# Cache marks: on tools, on blocks of the system prompt and of messages, and at the root, which
# marks the last block that can have a mark.


def _contents(body: Json) -> Iterator[tuple[Place, str, Any]]:
    """Each text or list of blocks in prompt order, after its place and its field's name."""
    yield ("tools",), "tools", body.get("tools")
    yield ("system",), "system", body.get("system")
    for i, message in enumerate(listed(body.get("messages"))):
        if isinstance(message, dict):
            yield ("messages", i), f"messages.{i}.content", message.get("content")


def _find_marks(body: Json) -> Iterator[FoundMark]:
    """The marks in prompt order; the root's is last."""
    for place, field, content in _contents(body):
        if any(map(_may_hold_mark, listed(content))):
            yield from marks_in(content, place, field)
    if (control := control_of(body)) is not None:
        yield FoundMark(_last_place(body), "", None, control)


def _may_hold_mark(block: Any) -> bool:
    """False for most blocks: those with neither a mark nor parts."""
    return isinstance(block, dict) and (
        "cache_control" in block or type(block.get("content")) is list
    )


def _last_place(body: Json) -> Place:
    """The place of the last block that can have a mark; () if there is none."""
    last: Place = ()
    for place, _, content in _contents(body):
        if isinstance(content, str) and content:
            last = place
        for j, block in enumerate(listed(content)):
            if _can_have_mark(block):
                last = (*place, j)
    return last


def _can_have_mark(block: Any) -> bool:
    if not isinstance(block, dict) or block.get("type") in UNMARKABLE:
        return False
    return block.get("type") != "text" or block.get("text") != ""


# Answers

_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def _join(events: Iterable[bytes]) -> Json:
    blocks: dict[int, Json] = {}
    deltas: defaultdict[int, list[Json]] = defaultdict(list)
    end: Json = {}
    for data in events:
        event = parsed(data)
        kind = event.get("type")
        if kind == "content_block_start":
            blocks[event["index"]] = as_object(event["content_block"])
        elif kind == "content_block_delta":
            deltas[event["index"]].append(event["delta"])
        elif kind == "message_delta":
            end |= event["delta"]
        elif kind == "message_stop":
            require(deltas.keys() <= blocks.keys())
            return {**end, "content": [_joined(b, deltas[index]) for index, b in blocks.items()]}
        elif kind == "error":
            break
    raise ValueError("the stream was cut or ended in an error")


def _joined(block: Json, deltas: list[Json]) -> Json:
    added: defaultdict[str, list[str]] = defaultdict(list)
    for delta in deltas:
        key = _DELTAS[delta["type"]]
        added[key].append(delta[key])
    texts = {key: (block.get(key) or "") + "".join(parts) for key, parts in added.items()}
    arguments = texts.pop("partial_json", "")
    return {**block, **texts, **({"input": orjson.loads(arguments)} if arguments else {})}


def _read(message: Json) -> list[Json]:
    content: list[Json] = []
    for block in message["content"]:
        kind = block["type"]
        if kind == "tool_use":
            as_text(block["id"])
            call = {key: block[key] for key in ("type", "id", "name", "input")}
            content.append({**call, "input": as_object(block["input"])})
        elif kind == "text":
            if as_text(block["text"]).strip():  # clients leave out blank texts: they are invalid
                content.append({"type": "text", "text": block["text"]})
        else:
            require(kind == "thinking")
            if as_text(block["thinking"]):
                signed = {"signature": block["signature"]} if block.get("signature") else {}
                content.append({"type": "thinking", "thinking": block["thinking"], **signed})
    kinds = {block["type"] for block in content}
    reasons = ("tool_use",) if "tool_use" in kinds else ("end_turn", "stop_sequence")
    require(message["stop_reason"] in reasons and not kinds <= {"thinking"})
    return [{"role": "assistant", "content": content}]


def _add_results(items: list[Json], results: list[Result]) -> list[Json]:
    """Results of one turn's calls stand in one message."""
    blocks = [{"type": "tool_result", "tool_use_id": c, "content": text} for c, _, text in results]
    if result_ids(items[-1]):
        *items, last = items
        blocks = [*last["content"], *blocks]
    return [*items, {"role": "user", "content": blocks}]


# Stored contexts


def _add_texts(body: Json, parts: list[Json]) -> None:
    own = body.get("system") or []
    if isinstance(own, str):
        own = [{"type": "text", "text": own}]
    if parts and isinstance(own, list):
        body["system"] = [*parts, *own]


def _write_tool(function: Json, schema: Any) -> Json:
    return {**function, "input_schema": {"type": "object"} if schema is None else schema}


_TOOL_FORM = ToolForm(lambda tool: "input_schema" in tool, _write_tool)

# Errors

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _error_body(
    status: int,
    message: str,
    request_id: str = "",
    code: str | None = None,
    param: str | None = None,
) -> bytes:
    kind = _ERROR_TYPES.get(status, "api_error")
    error: Json = {"type": kind, "message": message}
    if code is not None and code.startswith("thread_"):
        error["details"] = {"error_code": code}
    document: Json = {"type": "error", "error": error}
    return orjson.dumps(document | {"request_id": request_id} if request_id else document)


def _error_event(message: str, events_sent: int, request_id: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % _error_body(500, message, request_id)


def _late_error(document: Json, events_sent: int) -> bytes:
    return b"event: error\ndata: %b\n\n" % orjson.dumps(document)


def status_of_type(error_type: str) -> int:
    """The HTTP status of one of Anthropic's error types; 500 if it is no request's fault."""
    return next((status for status, kind in _ERROR_TYPES.items() if kind == error_type), 500)


# The balancer puts a thread's earlier turns in its place.
_REFUSED = {"thread": "send the whole conversation"}

ANTHROPIC = Protocol(
    name="messages",
    paths=("/v1/messages",),
    # Clients retry a 529, which HTTP itself does not define.
    errors=ErrorShape(_error_body, _error_event, _late_error, "request-id", (529, b"Overloaded")),
    beat=b'event: ping\ndata: {"type": "ping"}\n\n',
    prompt=((Part.TOOLS, "tools"), (Part.INSTRUCTIONS, "system"), (Part.MESSAGES, "messages")),
    marks=MarkRules(_find_marks, is_strict=True),
    conversation=Conversation(_join, _read, _add_results, required={"max_tokens": 1}),
    tool_form=_TOOL_FORM,
    add_texts=_add_texts,
    translate=translate,
    refused=_REFUSED,
    formats=("output_config.format", "output_format"),
    recognizes=_recognizes,
)
COUNT_TOKENS = Protocol(
    paths=("/v1/messages/count_tokens",),
    errors=ANTHROPIC.errors,
    prompt=ANTHROPIC.prompt,
    generates=False,
    tool_form=_TOOL_FORM,
    add_texts=_add_texts,
    translate=translate,
    refused=_REFUSED,
)
