"""OpenAI's responses: `/v1/responses`."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import orjson

from sgl_ext.protocols.errors import openai_body
from sgl_ext.protocols.prompt_cache import breakpoints_in, read_fields
from sgl_ext.protocols.tools import (
    OFFERED,
    LateTools,
    called_name,
    tools_of_item,
    with_allowed_tools,
    with_offered_tools,
)
from sgl_ext.reading.next_turn import CALL_OUTPUTS, as_object, as_text, parsed, require
from sgl_ext.reading.protocol import (
    COMMENT,
    Conversation,
    ErrorShape,
    FoundMark,
    Json,
    MarkRules,
    Model,
    Part,
    Protocol,
    Result,
    ToolForm,
    listed,
)
from sgl_ext.reading.rewriting import (
    DROPPED,
    Counts,
    as_json,
    edited,
    is_object,
    kind_of,
    not_shown,
    readable,
    text_of,
    text_part,
    with_items,
    without_nulls,
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


# Rewrites bodies of `/v1/responses`, as Codex and OpenAI's SDKs send them.

_INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
)
# For OpenAI's own servers. SGLang ignores it: a prompt that is too long is an error.
_IGNORED = ("context_management",)
_TIERS = ("auto", "default", "flex", "scale", "priority")
_SUMMARIES = ("auto", "concise", "detailed")
_KNOWN_ITEMS = ("message", "reasoning", "item_reference")
# Calls of tools that the client ran, with the field that holds their input.
_CLIENT_CALLS = {
    "local_shell_call": "action",
    "shell_call": "action",
    "computer_call": "action",
    "apply_patch_call": "operation",
}
# Items that bring tools along.
_TOOL_ITEMS = ("additional_tools", "tool_search_output")
_LEFT_OUT = (
    "code_interpreter_call",
    "compaction",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
)
_TEXTS = ("text", "input_text", "output_text")
_MEDIA = {
    "input_image": "image",
    "image_url": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "input_video": "video",
    "video_url": "video",
}


def translate(body: Json, model: Model, counts: Counts) -> Json:
    """A response's body for SGLang."""
    body = with_items(without_nulls(body), "include", partial(_included, counts=counts))
    counts.update(field for field in _IGNORED if body.get(field))
    body = _with_text_metadata(body, counts)
    if isinstance(body.get("service_tier"), str) and body["service_tier"] not in _TIERS:
        counts["service_tier"] += 1
        body = edited(body, {"service_tier": DROPPED})
    reasoning = body.get("reasoning")
    summary = reasoning.get("summary") if isinstance(reasoning, dict) else None
    if isinstance(summary, str) and summary not in _SUMMARIES:
        counts["reasoning_summary"] += 1
        body = edited(body, {"reasoning": edited(body["reasoning"], {"summary": DROPPED})})
    body = with_offered_tools(body, model, counts)
    body = _with_choice(body, model, counts)
    late = LateTools(body.get("tools"), counts)
    body = with_items(body, "input", partial(_item, model=model, counts=counts, late=late))
    if late.added:
        body = edited(body, {"tools": late.with_added(body.get("tools"))})
    return body


def _with_text_metadata(body: Json, counts: Counts) -> Json:
    """A body whose metadata, which the answer repeats, holds texts, as the SDKs' types want."""
    metadata = body.get("metadata")
    if not isinstance(metadata, dict) or all(isinstance(each, str) for each in metadata.values()):
        return body
    counts["metadata"] += 1
    texts = {key: v if isinstance(v, str) else as_json(v) for key, v in metadata.items()}
    return edited(body, {"metadata": texts})


def _included(name: Any, counts: Counts) -> Any:
    if not isinstance(name, str) or name in _INCLUDED:
        return name
    counts["include"] += 1
    return DROPPED


def _with_choice(body: Json, model: Model, counts: Counts) -> Json:
    choice = body.get("tool_choice")
    kind = kind_of(choice)
    if choice is None or kind is None:
        return body
    if kind == "allowed_tools":
        return with_allowed_tools(body, model, counts)
    if kind not in OFFERED:
        counts["tool_choice"] += 1
    elif not model.takes_namespaces and "namespace" in choice:
        named = edited(choice, {"name": called_name(choice, model), "namespace": DROPPED})
        return edited(body, {"tool_choice": named})
    return body


def _item(item: Any, model: Model, counts: Counts, late: LateTools) -> Any:
    """An item of the conversation that SGLang can render."""
    if not isinstance(item, dict):
        return item
    kind = kind_of(item)
    part = partial(_part, model=model, counts=counts)
    if not model.has_phases and item.get("phase") is not None:
        # It would separate a text from the call after it, though the model wrote both in one turn.
        counts["phase"] += 1
        item = edited(item, {"phase": DROPPED})
    if kind is None or kind in _KNOWN_ITEMS:
        return with_items(item, "content", part) if kind != "reasoning" else item
    if kind in CALL_OUTPUTS:
        item = _with_object(item, counts) if kind == "function_call" else item
        if model.takes_namespaces or not isinstance(item.get("namespace"), str):
            return item
        return edited(item, {"name": called_name(item, model), "namespace": DROPPED})
    if kind in CALL_OUTPUTS.values():
        return with_items(item, "output", part)
    call_id = item.get("call_id") or item.get("id")
    if kind in _CLIENT_CALLS:
        counts[kind] += 1
        arguments = as_json(item.get(_CLIENT_CALLS[kind]) or {})
        name = kind.removesuffix("_call")
        call = {"type": "function_call", "call_id": call_id, "name": name}
        return {**call, "arguments": arguments}
    if kind.removesuffix("_output") in _CLIENT_CALLS:
        counts[kind] += 1
        output = readable(item.get("output")) or not_shown("image")
        return {"type": "function_call_output", "call_id": call_id, "output": output}
    if kind in _TOOL_ITEMS:
        counts[kind] += 1
        text = late.define(tools_of_item(item, model, counts))
        return {"role": "developer", "content": text} if text else DROPPED
    if kind == "tool_search_call":
        counts[kind] += 1
        text = f"[tool_search was called with {as_json(item.get('arguments'))}]"
        return {"role": "assistant", "content": text}
    if kind == "mcp_call":
        counts[kind] += 1
        text = f"[{item.get('name')} was called with {item.get('arguments')}]\n"
        return {"role": "assistant", "content": text + readable(item)}
    counts[kind if kind in _LEFT_OUT else "unknown_item"] += 1
    return DROPPED


def _with_object(item: Json, counts: Counts) -> Json:
    """A call whose arguments are the text of an object: SGLang leaves any other out."""
    given = item.get("arguments")
    if "arguments" not in item or is_object(given):
        return item
    counts["call_arguments"] += 1
    return edited(item, {"arguments": text_of(given)})


def _part(part: Any, model: Model, counts: Counts) -> Any:
    kind = kind_of(part)
    if kind is None or kind in _TEXTS:
        return part
    if kind in _MEDIA:
        if model.sees and kind != "computer_screenshot":
            return part
        counts["image" if _MEDIA[kind] == "image" else "media"] += 1
        return text_part(not_shown(_MEDIA[kind]), "input_text")
    if kind == "input_file":
        counts["document"] += 1
        return text_part(not_shown("file", part.get("filename")), "input_text")
    if kind == "refusal":
        counts["refusal"] += 1
        return text_part(str(part.get("refusal")), "output_text")
    counts["unknown_part"] += 1
    text = part.get("text")
    return text_part(text, "input_text") if isinstance(text, str) else DROPPED


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
