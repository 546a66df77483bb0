"""A client's request for a summary of its conversation, and what its prompt keeps of earlier ones.

A client whose context is full sends the conversation once more and has the model sum it up. It
often leaves the tools out, and its last message is a user's, before which templates drop the
thinking of the running tool loop. Each makes another prompt, and the cache holds little of it:

    the turn before   instructions, tools | user | thinking, call | result
    as sent           instructions        | user | call | result | user: sum up
    as kept here      instructions, tools | user | thinking, call | result | user: sum up

With the tools in the prompt, a grammar excludes calls, as for `tool_choice: none`.
"""

import re
from typing import Any, NamedTuple

from sgl_ext.reading.client import COMPACTION, ClientFacts
from sgl_ext.reading.protocol import Json, Protocol, objects

# Both must be in the last message of a request whose client does not say what it is for.
_SUMS_UP = re.compile(
    r"(?i:\b(?:summary|summari[sz]e|snapshot)\b[^\n]{0,120}\b(?:conversation|session|LLM)\b)"
    r"|CONTEXT CHECKPOINT COMPACTION|<state_snapshot>"
)
_NO_TOOLS = re.compile(r"(?i)\b(?:do not|don't|never) (?:call|use)\b[^\n.]{0,40}\btools?\b")
_SUMMARY_TOKENS = 8192
_TAILS = (64, 32, 16, 8)
_MOST_HEADER_CHARS = 200


class Summary(NamedTuple):
    """A request for a summary. body: as its client sent it. keeps_tools: they are not in it."""

    body: Json
    keeps_tools: bool = False


def leaves_room(prompt_tokens: int, window_tokens: int) -> bool:
    """Whether a summary fits behind a prompt that is longer than the client knows."""
    return prompt_tokens + min(_SUMMARY_TOKENS, window_tokens // 16) <= window_tokens


def asks_for_summary(facts: ClientFacts, protocol: Protocol, body: Any, *, had_tools: bool) -> bool:
    """Whether a request has the model sum its conversation up. Never raises.

    What the client says of it decides. Otherwise its last message must ask for a summary of a
    conversation, and for no call: in words, or because tools that the turn before had are missing.
    """
    if facts.request_class:
        return facts.request_class == COMPACTION
    if facts.compaction:
        return True
    if not isinstance(body, dict):
        return False
    text = _last_user_text(protocol, body)
    lacks_tools = had_tools and not body.get("tools")
    return bool(_SUMS_UP.search(text)) and (lacks_tools or bool(_NO_TOOLS.search(text)))


def _last_user_text(protocol: Protocol, body: Json) -> str:
    """The text with which a body's last message ends, if a user says it; "" otherwise."""
    items = body.get(str(protocol.turns_field))
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, dict) or last.get("role") != "user":
        return ""
    content = last.get("content")
    if blocks := objects(content):
        content = blocks[-1].get("text")
    return content if isinstance(content, str) else ""


def with_tools(body: Json, tools: list[Any]) -> Json:
    """A body with the tools of the turn before; none may be called."""
    return {**body, "tools": tools, "tool_choice": "none"}


def appended(before: str, whole: str, text: str) -> str | None:
    """The prompt `before`, and after it the last message as `whole` renders it.

    before: the prompt without its last message, and without the beginning of an answer. whole: the
    prompt with both. text: what the last message says. None if it is not certain where that
    begins, or if nothing before it is rendered otherwise.
    """
    begin = whole.rfind(text.strip()) if text.strip() else -1
    if begin < 0 or not before or whole.startswith(before):
        return None
    for length in _TAILS:
        tail = before[-length:]
        found = whole.rfind(tail, max(begin - _MOST_HEADER_CHARS - length, 0), begin)
        if found >= 0:
            return before + whole[found + len(tail) :]
    return None
