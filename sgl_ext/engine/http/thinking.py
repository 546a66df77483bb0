"""Whether a chat template leaves out the thinking of earlier answers: asked once, by rendering.

What was generated after such a template's prompt begins with thinking that no later prompt
has, so nothing of it is ever read from the cache again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from sgl_ext.engine import sglang_api

_THOUGHT = "4ab1ce57 was thought"
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_ANSWERS: tuple[list[dict[str, Any]], ...] = (
    [{"content": "Done."}, {"role": "user", "content": "Go on."}],
    [
        {"content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Seen."},
    ],
)
_found: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def drops_thinking(chat: Any, rendering: Callable[[], AbstractContextManager[list[str]]]) -> bool:
    """Whether `chat`'s template renders no thinking, neither before a user's turn nor in a loop of
    tools. If that cannot be told, no. `rendering` collects what is rendered instead."""
    if chat not in _found:
        _found[chat] = all(_is_dropped(chat, rendering, turns) for turns in _ANSWERS)
    return _found[chat]


def _is_dropped(
    chat: Any,
    rendering: Callable[[], AbstractContextManager[list[str]]],
    turns: list[dict[str, Any]],
) -> bool:
    answer = {"role": "assistant", "reasoning_content": _THOUGHT, **turns[0]}
    messages = [{"role": "user", "content": "Begin."}, answer, *turns[1:]]
    try:
        request = sglang_api.ChatCompletionRequest(model="", messages=messages, tools=[_TOOL])
        with rendering() as rendered:
            chat._process_messages(request, False)
    except Exception:
        # A template may refuse what it does not know, in any way it likes.
        return False
    return bool(rendered) and _THOUGHT not in rendered[-1]
