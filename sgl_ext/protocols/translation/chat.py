"""Rewrites bodies of `/v1/chat/completions`, as OpenAI's SDKs and many harnesses send them."""

from __future__ import annotations

from functools import partial
from typing import Any

from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Model
from sgl_ext.requests.rewriting import (
    DROPPED,
    Counts,
    altered,
    edited,
    joined_text,
    kind_of,
    not_shown,
    reminder,
    without_nulls,
)

_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}


def translate(body: dict[str, Any], model: Model, counts: Counts) -> dict[str, Any]:
    """A chat completion's body for SGLang."""
    body = without_nulls(body)
    edits: dict[str, Any] = {}
    if isinstance(body.get("tools"), list):
        edits["tools"] = altered(body["tools"], partial(_tool, counts=counts))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        edits |= allowed_tools(allowed, edits.get("tools"), _name, counts)
    if isinstance(body.get("messages"), list):
        edits["messages"] = messages(body["messages"], model, counts)
    return edited(body, edits)


def _tool(tool: Any, counts: Counts) -> Any:
    kind = kind_of(tool)
    if kind is None or kind == "function":
        return tool
    counts["custom_tool" if kind == "custom" else "unknown_tool"] += 1
    return DROPPED


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def allowed_tools(allowed: dict[str, Any], tools: Any, name: Any, counts: Counts) -> dict[str, Any]:
    """Edits after which a request has only the tools that its choice allows."""
    counts["allowed_tools"] += 1
    edits: dict[str, Any] = {
        "tool_choice": "required" if allowed.get("mode") == "required" else "auto"
    }
    listed = allowed.get("tools")
    if isinstance(tools, list) and isinstance(listed, list):
        names = [name(tool) for tool in listed]
        edits["tools"] = [tool for tool in tools if name(tool) in names]
    return edits


def messages(items: list[Any], model: Model, counts: Counts) -> list[Any]:
    """Messages that SGLang can render."""
    items = altered(items, partial(_message, model=model, counts=counts))
    return items if model.takes_system_anywhere else with_reminders(items, counts)


def with_reminders(items: list[Any], counts: Counts) -> list[Any]:
    """Messages in which instructions after the first turn are part of a user's turn."""
    begun = False
    out: list[Any] = []
    for item in items:
        role = item.get("role") if isinstance(item, dict) else None
        text = joined_text(item.get("content")) if role in INSTRUCTION_ROLES else None
        if begun and text is not None:
            counts["system_message"] += 1
            item = {**item, "role": "user", "content": reminder(text)}
        begun = begun or role not in INSTRUCTION_ROLES
        out.append(item)
    return out if any(new is not old for new, old in zip(out, items, strict=True)) else items


def _message(message: Any, model: Model, counts: Counts) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = altered(message["content"], partial(_part, model=model, counts=counts))
    return edited(message, {"content": parts})


def _part(part: Any, model: Model, counts: Counts) -> Any:
    """A part of a message that SGLang can render."""
    kind = kind_of(part)
    if kind in _MEDIA and not model.sees:
        counts["image" if _MEDIA[kind] == "image" else "media"] += 1
        return {"type": "text", "text": not_shown(_MEDIA[kind])}
    if kind == "file":
        counts["document"] += 1
        file = part.get("file")
        name = file.get("filename") if isinstance(file, dict) else None
        return {"type": "text", "text": not_shown("file", name)}
    if kind == "refusal":
        counts["refusal"] += 1
        return {"type": "text", "text": str(part.get("refusal"))}
    return part
