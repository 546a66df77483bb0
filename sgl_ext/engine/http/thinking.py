"""Finds out whether a chat template leaves the thinking of earlier answers out, by rendering.

After such a template's prompt, the generated answer begins with thinking that no later prompt has,
so the answer is never read from the cache again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.sglang_http_types import ServingChat

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
Collecting = Callable[[], AbstractContextManager[list[str]]]


def drops_thinking(chat: ServingChat, collecting: Collecting) -> bool:
    """Whether `chat`'s template leaves thinking out, both before a user's turn and in a loop of
    tools. False if rendering fails. `collecting` collects the prompts rendered inside its block."""
    return all(_is_dropped(chat, collecting, turns) for turns in _ANSWERS)


def _is_dropped(chat: ServingChat, collecting: Collecting, turns: list[dict[str, Any]]) -> bool:
    answer = {"role": "assistant", "reasoning_content": _THOUGHT, **turns[0]}
    messages = [{"role": "user", "content": "Begin."}, answer, *turns[1:]]
    try:
        request = sglang_api.ChatCompletionRequest(model="", messages=messages, tools=[_TOOL])
        with collecting() as rendered:
            chat._process_messages(request, False)
    except Exception:
        return False  # templates raise errors of all kinds on what they do not know
    return bool(rendered) and _THOUGHT not in rendered[-1]
