"""Tokens that an engine computed before a request needed them, until their request comes.

They hold memory that other requests' prefixes could use, so their number is bounded where memory
is short (`scheduler.prefill.takeable_tokens`). They count for as long as they are in memory and
no request has read them:

    add       a slice put new tokens at the end of its node
    read      the conversation's next request came: its tokens are cache like any other
    load      a slice loaded tokens from the host, which are cache like any other at once
    unread    leaves out nodes that were evicted
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from cachetools import FIFOCache


class _Part(NamedTuple):
    node: Any
    tokens: int
    is_worthless: bool


class Unread(NamedTuple):
    """Unread tokens, and how many of them are evicted before any others."""

    tokens: int = 0
    worthless: int = 0


class ComputedAhead:
    """What was computed ahead and is unread, of at most `limit` conversations; beyond it the oldest
    one's tokens count as read. So it is with what was loaded ahead."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._parts: OrderedDict[str, list[_Part]] = OrderedDict()
        self._loaded: FIFOCache[str, int] = FIFOCache(limit)

    def add(self, conversation: str, node: Any, tokens: int, *, is_worthless: bool) -> None:
        """Records that `tokens` new tokens end at `node`. is_worthless: they are evicted first."""
        if conversation not in self._parts and len(self._parts) >= self._limit:
            self._parts.popitem(last=False)
        self._parts.setdefault(conversation, []).append(_Part(node, tokens, is_worthless))

    def load(self, conversation: str, tokens: int) -> None:
        """Records that tokens were loaded from the host."""
        if tokens:
            self._loaded[conversation] = self._loaded.get(conversation, 0) + tokens

    def read(self, conversation: str) -> int:
        """Records that the conversation's next request came; how many tokens were loaded for it."""
        self._parts.pop(conversation, None)
        return self._loaded.pop(conversation, 0)

    def unread(self, is_evicted: Callable[[Any], bool]) -> Unread:
        """What is still in memory and unread."""
        for name, parts in list(self._parts.items()):
            parts[:] = [part for part in parts if not is_evicted(part.node)]
            if not parts:
                del self._parts[name]
        left = [part for parts in self._parts.values() for part in parts]
        worthless = sum(part.tokens for part in left if part.is_worthless)
        return Unread(sum(part.tokens for part in left), worthless)

    def clear(self) -> None:
        """Records that the cache was emptied."""
        self._parts.clear()
        self._loaded.clear()
