"""How many tokens of a prompt lie before a place in its text.

Asked for the ends of marked blocks, turn after turn. What was found once is known by the
text before it; a new place is found from whichever is nearer, a known place before it or
the end of the prompt, by tokenizing what lies between. Both ways are proven against the
prompt's own ids: a text before or behind the place that tokenizes otherwise there than in
the prompt is not counted.

    text     |------ known ------|--- new block ---|place|-- rest --|
    ids      |-------------------|------------>             <-------|
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

_TOKEN_BYTES = 8
# A place inside a token: what comes before it tokenizes otherwise there, by so much at most.
_STRADDLING_TOKENS = 8


class _Known(NamedTuple):
    tokens: int
    ids: int  # hash of the ids up to there


class Offsets:
    """Finds offsets in prompts. `encode` tokenizes a text without adding anything.

    Remembers `limit` places, each by hashes alone.
    """

    def __init__(self, encode: Callable[[str], list[int]], limit: int = 65_536) -> None:
        self._encode = encode
        self._limit = limit
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def find(self, text: str, ends: Sequence[int], ids: Sequence[int]) -> list[int]:
        """For each place in `text`, ascending, how many of the prompt's `ids` end before it."""
        packed = memoryview(array("q", ids).tobytes())
        found: list[int] = []
        begin, tokens = 0, 0
        for end in ends:
            key = xxhash.xxh3_128_intdigest(text[:end].encode("utf-8", "surrogatepass"))
            known = self._known.get(key)
            if known is not None and known.ids == _digest(packed, known.tokens):
                tokens = known.tokens
            else:
                tokens = self._find(text, begin, end, ids, tokens)
                self._known[key] = _Known(tokens, _digest(packed, tokens))
            self._known.move_to_end(key)
            begin = end
            found.append(tokens)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return found

    def _find(self, text: str, begin: int, end: int, ids: Sequence[int], tokens: int) -> int:
        if len(text) - end < end - begin:
            rest = self._encode(text[end:])
            split = len(ids) - len(rest)
            if split >= tokens and list(ids[split:]) == rest:
                return split
        found = 0
        for start, before in ((begin, tokens), (0, 0)):
            between = self._encode(text[start:end])
            common = _common(between, ids[before : before + len(between)])
            found = max(found, before + common)
            if len(between) - common <= _STRADDLING_TOKENS:
                break  # else `begin` lay within a token
        return found


def _digest(packed: memoryview, tokens: int) -> int:
    return xxhash.xxh3_64_intdigest(packed[: tokens * _TOKEN_BYTES])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
