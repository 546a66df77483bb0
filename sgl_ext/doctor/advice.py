"""The meaning of each kind of divergence, and what to do about it."""

from __future__ import annotations

MEANINGS = {
    "clock": "a date or time changes",
    "id": "an id or a long number changes",
    "tool_order": "the same tools in another order",
    "tools_changed": "tools were added, removed or changed",
    "rewritten": "earlier messages changed",
    "truncated": "earlier messages were shortened or left out",
    "header": "a header line that is not stripped changes",
    "unknown": "a text changes",
}
_DO = {
    "tool_order": "start the launcher with --sort-tools, or send tools in one order",
    "tools_changed": "offer the same tools in every turn, new ones last; leave a tool unused "
    "by tool_choice instead of removing it",
    "rewritten": "send the history back unchanged, with all output of the model and its thinking",
    "truncated": "shorten the history rarely and by much, not a little in every turn",
    "header": "start the launcher with --strip-header NAME, the name that this block begins with",
}
_DO_IN_HEAD = {
    "clock": "move the date or time out of {part}, into the last message, or round it to the day",
    "id": "move the id out of {part}, into a header or the last message",
    "unknown": "move what changes (a folder, a state, a name) to the end of {part} or into "
    "the first message",
}
_DO_IN_MESSAGES = {
    "clock": "write a date or time once, into the message that it belongs to, and do not update it",
    "id": "send messages back with the ids they had",
}
_PARTS = {"tools": "the tools", "system": "the instructions", "messages": "the messages"}


def advice(kind: str, part: str) -> str:
    """What to do about a divergence of this kind in this part of the prompt."""
    if kind in _DO:
        return _DO[kind]
    by_part = _DO_IN_MESSAGES if part == "messages" else _DO_IN_HEAD
    text = by_part.get(kind, "compare two requests of this client at that place")
    return text.format(part=_PARTS.get(part, part))
