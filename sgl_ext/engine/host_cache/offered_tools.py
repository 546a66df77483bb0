"""The tools that each conversation offered last, which a request for its summary may leave out."""

from typing import Any

import orjson
import xxhash
from cachetools import LRUCache

from radix.byte_lru import ByteLRU
from sgl_ext.reading.segments import Chain

LIMIT_BYTES = 16 << 20
MOST_CONVERSATIONS = 4096


class OfferedTools:
    """Of at most MOST_CONVERSATIONS, and LIMIT_BYTES of different tools. Equal ones are stored
    once: most conversations of a client's version have the same."""

    def __init__(self) -> None:
        self._tools: ByteLRU[bytes] = ByteLRU(LIMIT_BYTES)
        self._offered: LRUCache[str, tuple[int, int]] = LRUCache(MOST_CONVERSATIONS)

    @property
    def used_bytes(self) -> int:
        return self._tools.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self._tools.limit_bytes

    def note(self, conversation: str, chain: Chain, tools: list[Any]) -> None:
        """Notes what a turn offers. It reads the tools only if the turn's head is a new one."""
        head = chain.hashes[chain.head_segments - 1] if chain.head_segments else 0
        known = self._offered.get(conversation)
        if known is not None and known[0] == head and self._tools.get(known[1]) is not None:
            return
        written = orjson.dumps(tools)
        key = xxhash.xxh3_128_intdigest(written)
        self._tools.add(key, written, len(written))
        self._offered[conversation] = head, key

    def last(self, conversation: str) -> list[Any]:
        """The tools of its last turn that had any; empty if none are known."""
        known = self._offered.get(conversation)
        written = None if known is None else self._tools.get(known[1])
        return [] if written is None else orjson.loads(written)
