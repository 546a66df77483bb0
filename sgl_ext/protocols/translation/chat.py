"""Rewrites bodies of `/v1/chat/completions`, as OpenAI's SDKs and many harnesses send them."""

from functools import partial
from typing import Any

from sgl_ext.protocols.translation.late_tools import LateTools
from sgl_ext.protocols.translation.tool_choice import with_allowed_tools
from sgl_ext.requests.call_arguments import is_object, text_of
from sgl_ext.requests.protocol import Json, Model, listed
from sgl_ext.requests.rewriting import (
    DROPPED,
    Counts,
    altered,
    as_json,
    edited,
    kind_of,
    not_shown,
    text_part,
    with_items,
    without_nulls,
)

_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}


def translate(body: Json, model: Model, counts: Counts) -> Json:
    """A chat completion's body for SGLang."""
    body = with_items(without_nulls(body), "tools", partial(_tool, counts=counts))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("allowed_tools"), dict):
        body = with_allowed_tools(body, model, counts)
    if body.get("web_search_options") is not None:  # it searches at OpenAI
        counts["web_search_tool"] += 1
        body = edited(body, {"web_search_options": DROPPED})
    late = LateTools(body.get("tools"), counts)
    return with_items(body, "messages", partial(_message, model=model, counts=counts, late=late))


def _tool(tool: Any, counts: Counts) -> Any:
    kind = kind_of(tool)
    if kind is None or kind == "function":
        return tool
    counts["custom_tool" if kind == "custom" else "unknown_tool"] += 1
    return DROPPED


def _message(message: Any, model: Model, counts: Counts, late: LateTools) -> Any:
    if not isinstance(message, dict):
        return message
    if not model.defers_tools:
        message = late.with_definitions(message)
    if message.get("role") in ("assistant", "function"):
        message = _as_now(message, counts)
    return with_items(message, "content", partial(_part, model=model, counts=counts))


def _as_now(message: Json, counts: Counts) -> Json:
    """A message whose calls, refusal or audio have the form that SGLang reads."""
    edits: Json = {}
    function = message.get("function_call")
    if isinstance(function, dict) and not message.get("tool_calls"):
        counts["function_call"] += 1
        call = {"id": _id_of(function.get("name")), "type": "function", "function": function}
        edits |= {"tool_calls": [call], "function_call": DROPPED}
    elif message.get("role") == "function":
        counts["function_call"] += 1
        edits |= {"role": "tool", "tool_call_id": _id_of(message.get("name"))}
    calls = listed(edits.get("tool_calls", message.get("tool_calls")))
    if any(kind_of(call) == "custom" for call in calls):
        calls = [_function_call(call, counts) for call in calls]
    read = altered(calls, partial(_with_object, counts=counts))
    if read and read is not message.get("tool_calls"):
        edits["tool_calls"] = read
    if not message.get("content"):
        if isinstance(refusal := message.get("refusal"), str) and refusal:
            counts["refusal"] += 1
            edits["content"] = refusal
        elif message.get("audio"):
            counts["media"] += 1
            edits["content"] = not_shown("audio")
    return edited(message, edits)


def _id_of(name: Any) -> str:
    """The id of a call of OpenAI's former functions, which have none."""
    return f"call_{name}"


def _function_call(call: Any, counts: Counts) -> Any:
    """A call of a tool whose input is a text, as a function's."""
    custom = call.get("custom") if kind_of(call) == "custom" else None
    if not isinstance(custom, dict):
        return call
    counts["custom_tool"] += 1
    arguments = as_json({"input": custom.get("input")})
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _with_object(call: Any, counts: Counts) -> Any:
    """A call whose arguments are the text of an object: SGLang rejects any other."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    if isinstance(given, dict) or is_object(given):
        return call
    counts["call_arguments"] += 1
    return {**call, "function": {**function, "arguments": text_of(given)}}


def _part(part: Any, model: Model, counts: Counts) -> Any:
    """A part of a message that SGLang can render."""
    kind = kind_of(part)
    if kind in _MEDIA and not model.sees:
        counts["image" if _MEDIA[kind] == "image" else "media"] += 1
        return text_part(not_shown(_MEDIA[kind]))
    if kind == "file":
        counts["document"] += 1
        file = part.get("file")
        name = file.get("filename") if isinstance(file, dict) else None
        return text_part(not_shown("file", name))
    if kind == "refusal":
        counts["refusal"] += 1
        return text_part(str(part.get("refusal")))
    return part
