"""Anthropic's protocol: `/v1/messages`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import orjson

from sgl_ext.protocols.tools import (
    ADDITION,
    REFERENCE,
    REMOVAL,
    LateTools,
    plain_tool,
)
from sgl_ext.reading.cache_marks import UNMARKABLE, control_of, marks_in
from sgl_ext.reading.next_turn import as_object, as_text, parsed, require, result_ids
from sgl_ext.reading.protocol import (
    Conversation,
    ErrorShape,
    FoundMark,
    Json,
    MarkRules,
    Model,
    Part,
    Place,
    Protocol,
    Result,
    ToolForm,
    listed,
    objects,
)
from sgl_ext.reading.rewriting import (
    DROPPED,
    Counts,
    as_json,
    edited,
    family_of,
    kind_of,
    not_shown,
    object_of,
    readable,
    text_part,
    with_items,
)
from sgl_ext.reading.segments import are_searched

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
    402: "billing_error",
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


# Rewrites bodies of `/v1/messages`, as Claude Code and Anthropic's SDKs send them.

# Fields for Anthropic's own servers. SGLang ignores them.
_IGNORED = (
    "betas",
    "compaction",
    "container",
    "context_management",
    "inference_geo",
    "mcp_servers",
    "speed",
)
_DISPLAYS = ("summarized", "omitted")
_SERVER_TOOLS = (
    "web_search",
    "web_fetch",
    "code_execution",
    "tool_search_tool",
    "mcp_toolset",
    "advisor",
)
_KNOWN_BLOCKS = frozenset({"text", "thinking", "search_result"})
_SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
_RESULT = "_tool_result"


def translate(body: Json, model: Model, counts: Counts) -> Json:
    """A body in Anthropic's protocol for SGLang."""
    counts.update(field for field in _IGNORED if body.get(field))
    if type(body.get("max_tokens")) is int and body["max_tokens"] == 0:
        # SGLang's type begins at 1. The sampling parameters get the 0.
        body = edited(body, {"max_tokens": 1})
    thinking = body.get("thinking")
    if kind_of(thinking) in ("enabled", "adaptive") and not model.thinks:
        counts["thinking"] += 1
        body = edited(body, {"thinking": DROPPED})
    elif isinstance(thinking, dict) and _is_unknown(thinking.get("display"), _DISPLAYS):
        counts["thinking_display"] += 1
        body = edited(body, {"thinking": edited(thinking, {"display": DROPPED})})
    if isinstance(form := body.get("output_format"), dict):  # earlier name of output_config.format
        counts["output_format"] += 1
        config = body.get("output_config")
        config = {"format": form, **(config if isinstance(config, dict) else {})}
        body = edited(body, {"output_config": config, "output_format": DROPPED})
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use", False) is None:
        choice = edited(choice, {"disable_parallel_tool_use": DROPPED})
        body = edited(body, {"tool_choice": choice})
    offered = partial(_tool, is_searched=are_searched(listed(body.get("tools"))), counts=counts)
    body = with_items(body, "tools", offered)
    late = LateTools(body.get("tools"), counts, partial(_tool, is_searched=True, counts=counts))
    block = partial(_block, model=model, counts=counts, late=late)
    body = with_items(body, "messages", partial(_message, block=block))
    if late.added:
        body = edited(body, {"tools": late.with_added(body.get("tools"))})
    return body


def _is_unknown(value: Any, known: tuple[str, ...]) -> bool:
    """Whether a text is none of those that SGLang knows."""
    return isinstance(value, str) and value not in known


def _tool(tool: Any, is_searched: bool, counts: Counts) -> Any:
    """A tool that SGLang can offer; DROPPED if it runs on Anthropic's servers."""
    kind = kind_of(tool)
    if not isinstance(tool, dict) or (kind is None and tool.get("type") is not None):
        return tool
    if kind is not None and kind != "custom":
        plain = plain_tool(tool)
        if plain is not None:
            counts[f"{plain[0]}_tool"] += 1
            return plain[1]
        family = family_of(kind, _SERVER_TOOLS)
        counts[family if family.endswith(("_tool", "_toolset")) else f"{family}_tool"] += 1
        if not isinstance(tool.get("input_schema"), dict):
            return DROPPED
        return edited(tool, {"type": DROPPED})
    edits: Json = {}
    if tool.get("strict", False) is None:
        edits["strict"] = DROPPED
    if is_searched and tool.get("defer_loading"):  # no server here searches for it
        counts["defer_loading"] += 1
        edits["defer_loading"] = DROPPED
    if examples := tool.get("input_examples"):
        counts["input_examples"] += 1
        about = tool.get("description") or ""
        edits["description"] = f"{about}\n\nExamples of its input: {as_json(examples)}".lstrip()
        edits["input_examples"] = DROPPED
    return edited(tool, edits)


def _message(message: Any, block: Callable[[Any], Any]) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    if all(map(_is_plain, message["content"])):  # the usual case: the rest can be skipped
        return message
    return with_items(message, "content", block)


def _is_plain(block: Any) -> bool:
    """Whether SGLang takes a block as it is, by its type alone."""
    if type(block) is not dict:
        return False
    kind = block.get("type")
    if kind == "tool_result":
        return type(block.get("content")) is str
    return kind == "text" or (kind == "tool_use" and type(block.get("input")) is dict)


def _block(
    block: Any, model: Model, counts: Counts, late: LateTools, *, in_result: bool = False
) -> Any:
    """A block that SGLang can render; DROPPED if it has no content for the model.

    A result inside a tool's result is unknown to the protocol, however deep.
    """
    kind = kind_of(block)
    if kind is None or kind in _KNOWN_BLOCKS:
        return block
    if kind == "tool_use":
        return _call(block, counts)
    if kind == "tool_result" and not in_result:
        if not model.defers_tools:
            block = late.with_definitions(block)
        inside = partial(_block, model=model, counts=counts, late=late, in_result=True)
        return with_items(block, "content", inside)
    if kind == REFERENCE:
        return block if model.defers_tools else text_part(late.refer([block]))
    if kind in (ADDITION, REMOVAL):
        text = late.change(block)
        return text_part(text) if text else DROPPED
    if kind == "image":
        source = block.get("source")
        if model.sees and kind_of(source) != "file":
            return block
        counts["image"] += 1
        return text_part(not_shown("image"))
    if kind == "document":
        counts["document"] += 1
        return _document(block, model)
    if kind == "redacted_thinking":
        counts["redacted_thinking"] += 1
        return DROPPED
    if kind in _SERVER_CALLS:
        counts["server_tool_use"] += 1
        return text_part(f"[{block.get('name')} was called with {as_json(block.get('input'))}]")
    if kind.endswith(_RESULT):
        counts["server_tool_result"] += 1
        content = block.get("content")
        found = objects(content.get("tool_references")) if isinstance(content, dict) else []
        text = late.refer(found) if found else readable(content)
        return text_part(f"[{kind[: -len(_RESULT)]} gave]\n{text}")
    counts["compaction" if kind == "compaction" else "unknown_block"] += 1
    changes = [late.change(change) for change in objects(block.get("tool_changes"))]
    text = "\n".join(each for each in (readable(block), *changes) if each)
    return text_part(text) if text else DROPPED


def _call(block: Json, counts: Counts) -> Json:
    """A call whose input is an object, as the protocol requires."""
    given = block.get("input", {})
    if isinstance(given, dict):
        return block
    counts["tool_use_input"] += 1
    return {**block, "input": object_of(given)}


def _document(block: Json, model: Model) -> Json:
    """A document's text, or a note that it is not shown."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    title = block.get("title")
    about = [text for text in (title, block.get("context")) if isinstance(text, str) and text]
    content = source.get("content")
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        text = source["data"]
    elif isinstance(content, str | list):
        text = readable(content)
    else:
        return text_part(not_shown("document", title or source.get("url")))
    return text_part("\n".join([*about, text]))


ANTHROPIC = Protocol(
    name="messages",
    paths=("/v1/messages",),
    # Clients retry a 529, which HTTP itself does not define.
    errors=ErrorShape(
        _error_body,
        _error_event,
        _late_error,
        "request-id",
        (529, b"Overloaded"),
        (402, b"Payment Required"),
    ),
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
