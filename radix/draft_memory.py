"""Finds drafts in the tokens of a request, and in those that earlier requests left.

A draft is a guess of a request's next tokens. `find_draft` looks for the longest suffix of the
request's tokens that stands at an earlier place, too. Of several places it takes the last. The
draft is what follows there:

    ... def greet(name):  return ...        ... def greet(name):
        ^^^^^^^^^^^^^^^^  ~~~~~~ the draft       ^^^^^^^^^^^^^^^^ the suffix

There is no index to build. One comparison of an array finds all places of the last token. Then the
tokens before all these places are compared together. This takes less time than a step of
decoding (`bench.decode` measures it). So a prompt costs 4 bytes a token, and a copy when its answer
begins. Its first token waits for nothing.

Earlier requests leave their last tokens under a key. Only requests of the same key find them: the
key decides which requests draft from each other.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]

SEARCHED_TOKENS = 131_072
"""How many of a request's last tokens are searched. Older ones are dropped."""

LOOK_BACK = 32
"""Longer matches are taken for this long."""

RECALLED_TOKENS = 65_536
"""The most tokens under one key."""

LEFT_TOKENS = 32_768
"""How many of its last tokens a request leaves to later ones."""

_COMPARED_AT_ONCE = 64
NOTHING: Tokens = np.empty(0, np.int32)
_END = -1
"""Where the tokens of one request end and another's begin. No token has this number."""


class Match(NamedTuple):
    """Where the longest suffix stands. at: where what follows begins. length: of the suffix, at
    most LOOK_BACK; 0: it is nowhere."""

    at: int = 0
    length: int = 0


class Draft(NamedTuple):
    """A guess of the next tokens. matched: how long the suffix is that they follow elsewhere.
    is_own: whether that place is in the request itself."""

    tokens: Tokens
    matched: int
    is_own: bool


NO_DRAFT = Draft(NOTHING, 0, True)


class TokenLog:
    """The last tokens of one request, which grow at their end."""

    def __init__(self, tokens: Any = ()) -> None:
        self.total = len(tokens)
        first = np.asarray(tokens[-SEARCHED_TOKENS:], np.int32)
        self._kept = len(first)
        self._array = np.empty(max(256, self._kept + self._kept // 8), np.int32)
        self._array[: self._kept] = first

    @property
    def tokens(self) -> Tokens:
        """A view of the stored tokens; `extend` may change it."""
        return self._array[: self._kept]

    @property
    def bytes(self) -> int:
        """Memory of the tokens: at most 5 bytes for each stored one, once they are many."""
        return self._array.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the end."""
        self.total += len(tokens)
        tokens = tokens[-SEARCHED_TOKENS:]
        end = self._kept + len(tokens)
        if end > len(self._array):
            kept = self.tokens[-max(1, SEARCHED_TOKENS - len(tokens)) :]
            self._kept, end = len(kept), len(kept) + len(tokens)
            larger = np.empty(end + max(256, end // 8), np.int32)
            larger[: self._kept] = kept
            self._array = larger
        self._array[self._kept : end] = tokens
        self._kept = end


def find_suffix(tokens: Tokens, suffix: Tokens) -> Match:
    """The last of the longest places in `tokens` of an end of `suffix`, with a token after it."""
    if not len(suffix) or len(tokens) < 2:
        return Match()
    backwards, length = suffix[: -LOOK_BACK - 1 : -1], 1
    places = np.flatnonzero(tokens[:-1] == backwards[0])
    if not len(places):
        return Match()
    while length < len(backwards) and len(places) > _COMPARED_AT_ONCE:
        inside = places[np.searchsorted(places, length) :]
        longer = inside[tokens[inside - length] == backwards[length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    # In text that repeats itself there may still be thousands; the last ones are as good.
    places = places[-_COMPARED_AT_ONCE:]
    if length == len(backwards):
        return Match(int(places[-1]) + 1, length)
    # A negative place reads another token, if the array is long enough, and is taken out below.
    before = np.maximum(places[:, None] - np.arange(length, len(backwards)), -1)
    same = (tokens[before] == backwards[length:]) & (before >= 0)
    lengths = length + np.where(same.all(1), same.shape[1], same.argmin(1))
    best = len(places) - 1 - int(lengths[::-1].argmax())
    return Match(int(places[best]) + 1, int(lengths[best]))


def find_draft(
    log: TokenLog, recalled: Tokens = NOTHING, most: int = 15, rewritten: Tokens = NOTHING
) -> Draft:
    """The draft of at most `most` tokens after a request's tokens; NO_DRAFT if there is none.

    recalled: what earlier requests left. rewritten: the request's prompt as it would be written
    again. Where matches are as long, the request's own place counts, then one in `recalled`.
    """
    own = log.tokens
    suffix = own[-LOOK_BACK - 1 :]
    match, found = find_suffix(own, suffix), own
    for other in (recalled, rewritten):
        if match.length < LOOK_BACK:
            longer = find_suffix(other, suffix)
            if longer.length > match.length and other[longer.at] != _END:
                match, found = longer, other
    if not match.length:
        return NO_DRAFT
    following = found[match.at : match.at + most]
    if found is own:
        # What follows may be the suffix itself: then the tokens repeat, and go on repeating.
        return Draft(np.resize(following, most), match.length, is_own=True)
    ends = np.flatnonzero(following == _END)
    following = following[: ends[0]] if len(ends) else following
    return Draft(following.copy(), match.length, is_own=found is rewritten)


class DraftMemory:
    """The tokens that finished requests left, by key, within `limit_bytes`; the key that was used
    longest ago goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._left: OrderedDict[Hashable, tuple[list[tuple[int, Tokens]], Tokens]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def leave(self, key: Hashable, log: TokenLog) -> int:
        """Keeps a finished request's last tokens. Returns how many keys went for it.

        They replace those of a request that this one continues, as a next turn does.
        """
        tokens = log.tokens[-LEFT_TOKENS:].copy()
        begin = log.total - len(tokens)
        if not len(tokens):
            return 0
        requests, joined = self._left.pop(key, ([], NOTHING))
        self.bytes -= _bytes(requests, joined)
        requests = [each for each in requests if not _continues(begin, tokens, *each)]
        requests.append((begin, tokens))
        while sum(len(each) + 1 for _, each in requests) > RECALLED_TOKENS:
            del requests[0]
        joined = np.concatenate([part for _, each in requests for part in (each, [_END])]).astype(
            np.int32
        )
        self._left[key] = requests, joined
        self.bytes += _bytes(requests, joined)
        gone = 0
        while self.bytes > self.limit_bytes and self._left:
            _, left = self._left.popitem(last=False)
            self.bytes -= _bytes(*left)
            gone += 1
        return gone

    def recall(self, key: Hashable) -> Tokens:
        """What the requests of this key left; nothing if there was none."""
        found = self._left.get(key)
        if found is None:
            return NOTHING
        self._left.move_to_end(key)
        return found[1]

    def clear(self) -> None:
        """Forgets everything."""
        self._left.clear()
        self.bytes = 0

    def check(self) -> None:
        """Raises AssertionError unless the memory is within its bounds."""
        assert self.bytes == sum(_bytes(*left) for left in self._left.values())
        assert self.bytes <= self.limit_bytes
        assert all(len(joined) <= RECALLED_TOKENS for _, joined in self._left.values())


def _bytes(requests: list[tuple[int, Tokens]], joined: Tokens) -> int:
    return sum(tokens.nbytes for _, tokens in requests) + joined.nbytes


def _continues(begin: int, tokens: Tokens, other_begin: int, other: Tokens) -> bool:
    """Whether tokens that begin at a position contain the others, as far as both are stored."""
    shared_end = other_begin + len(other)
    if not other_begin <= begin < shared_end <= begin + len(tokens):
        return False
    return bool(np.array_equal(tokens[: shared_end - begin], other[begin - other_begin :]))
