"""How many tokens of a prompt lie before the end of a block, known from earlier prompts or counted.

    known      the same content up to the block had the same tokens before
    by tail    the prompt's last block ends where the text begins that the template writes after it,
               whatever token that is in
    counted    the text around the place is tokenized, from the nearer of the last place found
               before it and the end of the prompt

Each result is proven against the prompt's own ids. So a stale entry, or a text that tokenizes
differently by itself, can fail to find an end, and cannot find a wrong one.
"""

from array import array
from collections.abc import Callable, Sequence
from threading import Lock

import xxhash
from cachetools import FIFOCache, LRUCache

from sgl_ext.engine.host_cache.worth import Worth
from sgl_ext.reading.places import common_prefix

# A place may lie inside a token. Then the text before it ends in at most so many other tokens.
_STRADDLING_TOKENS = 8
_LIMIT_KNOWN = 65_536
_LIMIT_TAILS = 16
_LIMIT_TAIL_CHARS = 256
# A tail follows the block if so much of the block's text is before it.
_SHOWN_CHARS = 24
_SHOWN_TOKENS = 32

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


class TokenOffsets:
    """Ends of blocks in prompts of one tokenizer and template. It is thread-safe.

    `encode` tokenizes a text without adding anything, `decode` is its inverse. worth: the account
    of what is found again, in requests.
    """

    def __init__(self, encode: Encode, decode: Decode, limit: int = _LIMIT_KNOWN) -> None:
        self._encode = encode
        self._decode = decode
        self._known: LRUCache[int, tuple[int, int]] = LRUCache(limit)  # tokens, and their digest
        self._tails: FIFOCache[str, int] = FIFOCache(_LIMIT_TAILS)  # with their lengths in tokens
        self._lock = Lock()
        self.worth = Worth("block ends")

    def clear(self) -> None:
        """Forgets what was found."""
        with self._lock:
            self._known.clear()
            self._tails.clear()

    def recall(self, key: int, ids: "array[int]") -> int | None:
        """The end of the block whose content has the hash `key`, with everything before it."""
        with self._lock:
            tokens, digest = self._known.get(key, (None, 0))
        return None if tokens is None or digest != _digest(ids, tokens) else tokens

    def remember(self, key: int, tokens: int, ids: "array[int]") -> None:
        """Stores the end that was found for such a block."""
        with self._lock:
            self._known[key] = tokens, _digest(ids, tokens)

    def by_tail(self, text: str, ids: "array[int]") -> int | None:
        """The end of the prompt's last block, which ends with `text`."""
        shown = text.rstrip()[-_SHOWN_CHARS:]
        with self._lock:
            tails = list(self._tails.items()) if shown else []
        longest = max((size for _, size in tails), default=0)
        end = self._decode(ids[-longest - _SHOWN_TOKENS :].tolist()) if tails else ""
        for tail, size in tails:
            if end.endswith(tail) and end[: -len(tail)].rstrip().endswith(shown):
                for taken in range(max(1, size - _STRADDLING_TOKENS), size + _STRADDLING_TOKENS):
                    if self._decode(ids[-taken:].tolist()).endswith(tail):
                        return len(ids) - taken
                return None
        return None

    def remember_tail(self, tail: str) -> None:
        """Stores what was found after the last block of a prompt."""
        size = len(self._encode(tail)) if 0 < len(tail) <= _LIMIT_TAIL_CHARS else 0
        if size:
            with self._lock:
                self._tails.setdefault(tail, size)

    def count(self, text: str, ends: Sequence[int], ids: "array[int]") -> list[int]:
        """For each place in the prompt's `text`, ascending, how many tokens end before it."""
        found: list[int] = []
        begin, tokens = 0, 0
        for end in ends:
            tokens = self._count(text, begin, end, ids, tokens)
            found.append(tokens)
            begin = end
        return found

    def _count(self, text: str, begin: int, end: int, ids: "array[int]", tokens: int) -> int:
        if len(text) - end < end - begin:
            rest = self._encode(text[end:])
            split = len(ids) - len(rest)
            if split >= tokens and ids[split:].tolist() == rest:
                return split
        found = 0
        for start, before in ((begin, tokens), (0, 0)):
            between = self._encode(text[start:end])
            common = common_prefix(between, ids[before : before + len(between)].tolist())
            found = max(found, before + common)
            if len(between) - common <= _STRADDLING_TOKENS:
                break  # else `begin` lay within a token
        return found


def _digest(ids: "array[int]", tokens: int) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(ids)[:tokens])
