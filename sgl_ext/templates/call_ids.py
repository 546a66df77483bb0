"""Ids of calls for templates that take no other ids than those of Mistral's own API."""

import hashlib
from collections import Counter
from typing import Any

Json = dict[str, Any]
LENGTH = 9


def with_short_ids(messages: list[Json], counts: Counter[str]) -> list[Json]:
    """Messages whose calls have ids of 9 letters and digits. The same id becomes the same one."""
    return [_with_short_ids(message, counts) for message in messages]


def _with_short_ids(message: Json, counts: Counter[str]) -> Json:
    edits: Json = {}
    if calls := message.get("tool_calls"):
        edits["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
    if "tool_call_id" in message:
        edits["tool_call_id"] = _short(message["tool_call_id"])
    if all(message[key] == value for key, value in edits.items()):
        return message
    counts["call_id"] += 1
    return {**message, **edits}


def _short(id: Any) -> str:
    if isinstance(id, str) and len(id) == LENGTH and id.isalnum():
        return id
    return hashlib.blake2s(str(id).encode(), usedforsecurity=False).hexdigest()[:LENGTH]
