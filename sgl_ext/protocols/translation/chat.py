"""Rewrites bodies of `/v1/chat/completions`, as OpenAI's SDKs and many harnesses send them."""

from functools import partial
from typing import Any

from sgl_ext.protocols.translation.late_tools import LateTools
from sgl_ext.protocols.translation.tool_choice import with_allowed_tools
from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Json, Model
from sgl_ext.requests.rewriting import (
    DROPPED,
    Counts,
    joined_text,
    kind_of,
    not_shown,
    reminder,
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
    late = LateTools(body.get("tools"), counts)
    body = with_items(body, "messages", partial(_message, model=model, counts=counts, late=late))
    return body if model.takes_system_anywhere else with_reminders(body, "messages", counts)


def _tool(tool: Any, counts: Counts) -> Any:
    kind = kind_of(tool)
    if kind is None or kind == "function":
        return tool
    counts["custom_tool" if kind == "custom" else "unknown_tool"] += 1
    return DROPPED


def with_reminders(body: Json, field: str, counts: Counts) -> Json:
    """A request in which instructions after the first turn are part of a user's turn."""
    begun = False

    def change(item: Any) -> Any:
        nonlocal begun
        role = item.get("role") if isinstance(item, dict) else None
        text = joined_text(item.get("content")) if role in INSTRUCTION_ROLES else None
        was_begun, begun = begun, begun or role not in INSTRUCTION_ROLES
        if not was_begun or text is None:
            return item
        counts["system_message"] += 1
        return {**item, "role": "user", "content": reminder(text)}

    return with_items(body, field, change)


def _message(message: Any, model: Model, counts: Counts, late: LateTools) -> Any:
    if not isinstance(message, dict):
        return message
    if not model.defers_tools:
        message = late.with_definitions(message)
    return with_items(message, "content", partial(_part, model=model, counts=counts))


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
