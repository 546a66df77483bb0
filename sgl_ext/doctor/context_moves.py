"""Which block of its context a session changed, when it moves from one context to another."""

from collections.abc import Hashable
from itertools import zip_longest
from typing import NamedTuple

from cachetools import LRUCache

CONTEXT_CHANGED = "context_changed"
MAX_SESSIONS = 4096
_MAX_ID_CHARS = 80


class NamedBlock(NamedTuple):
    """A block of a context without its content. hash: of the content."""

    id: str
    layer: str
    hash: str


class ContextMoves:
    """The last context of each session; of the sessions, the last used are remembered."""

    def __init__(self) -> None:
        # Numbers in place of names, which clients choose: so an entry is small.
        self._last: LRUCache[Hashable, tuple[int, ...]] = LRUCache(MAX_SESSIONS)

    def __len__(self) -> int:
        return len(self._last)

    def note(self, session: Hashable, context: tuple[NamedBlock, ...]) -> str | None:
        """The first block that differs from the session's last context; None if none does, or if it
        had none. Remembers this one."""
        now = tuple(map(hash, context))
        before = self._last.get(session)
        self._last[session] = now
        if before is None or before == now:
            return None
        pairs = enumerate(zip_longest(before, now))
        first = next(number for number, (old, new) in pairs if old != new)
        block = context[min(first, len(context) - 1)]
        return f"block {block.id[:_MAX_ID_CHARS]} of layer {block.layer}"
