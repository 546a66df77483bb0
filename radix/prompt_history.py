"""Prompts that were tokenized, to go on from where one of them ends: an agent's prompt is the one
before it and a little more.

A prompt is known with its last few cuts: places where its tokens so far depend on nothing behind,
once `ahead` further characters are known to be the same. The next prompt of the same conversation
parts from it somewhere in what was written behind the last turn, and goes on from the cut before.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

# What a prompt takes beside its text and its tokens: its cuts, an array, its place in the table.
# Between texts and arrays of all lengths, an allocator leaves up to an eighth unused.
ENTRY_BYTES = 10_000
_MOST = 512
# So many last cuts of a prompt are known at least, and at most.
_LEAST_CUTS, _MOST_CUTS = 8, 32
_PROBED_CHARS = 32


class Cut(NamedTuple):
    """A place in a prompt: so many characters are so many tokens, and `before` ends there."""

    chars: int
    tokens: int
    before: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    """parts: its text up to the first cut and `ahead` behind it, from there on to the next, ..."""

    space: str
    parts: tuple[str, ...]
    tokens: array[int]
    cuts: tuple[Cut, ...]
    size_bytes: int

    def shared_cuts(self, text: str) -> int:
        """Up to how many cuts, and enough behind them, a text is the same."""
        head = self.parts[0]
        probe = head[-_PROBED_CHARS:]
        # Of other prompts, many begin alike, and most differ here.
        if not text.startswith(probe, len(head) - len(probe)):
            return 0
        end = 0
        for number, part in enumerate(self.parts):
            if not text.startswith(part, end):
                return number
            end += len(part)
        return len(self.parts)


class Begun(NamedTuple):
    """The beginning of a prompt, up to a cut, with its tokens, in an array of the caller's own.

    number, cuts: of which known prompt it is the beginning, and with how many of its cuts.
    """

    cut: Cut
    tokens: array[int]
    number: int
    cuts: int


class Prompts:
    """The most recently used prompts, within `limit_bytes`.

    ahead: how many characters behind a cut decide whether it is one.
    What is known in one space is not in another. Several threads may use it at once.
    """

    def __init__(self, limit_bytes: int, ahead: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._ahead = ahead
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._kept = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, space: str, text: str) -> Begun | None:
        """The beginning of a text in the last used prompt that it continues."""
        with self._lock:
            for number, prompt in reversed(self._prompts.items()):
                cuts = prompt.shared_cuts(text) if prompt.space == space else 0
                if cuts:
                    cut = prompt.cuts[cuts - 1]
                    return Begun(cut, prompt.tokens[: cut.tokens], number, cuts)
        return None

    def keep(
        self,
        space: str,
        text: str,
        tokens: array[int],
        cuts: Sequence[Cut],
        begun: Begun | None = None,
    ) -> None:
        """Remembers a prompt, in place of the one that it was begun from.

        cuts: some of the prompt's, ascending, behind the one where it was begun.
        """
        cuts = [cut for cut in cuts if cut.chars + self._ahead <= len(text)]
        with self._lock:
            known = None if begun is None else self._drop(begun.number)
            before = _Prompt(space, (), array("q"), (), 0) if known is None else known
            # Another may have been begun from it meanwhile, and it is gone.
            shared = 0 if begun is None or known is None else begun.cuts
            prompt = self._grown(before, shared, text, tokens, cuts)
            if prompt is None or prompt.size_bytes > self.limit_bytes:
                return
            self._kept += 1
            self._prompts[self._kept] = prompt
            self.used_bytes += prompt.size_bytes
            while self.used_bytes > self.limit_bytes or len(self._prompts) > _MOST:
                self._drop(next(iter(self._prompts)))

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._prompts.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """Asserts that what is counted is what is there, and within the bound."""
        found = sum(prompt.size_bytes for prompt in self._prompts.values())
        assert self.used_bytes == found <= self.limit_bytes

    def _drop(self, number: int) -> _Prompt | None:
        gone = self._prompts.pop(number, None)
        if gone is not None:
            self.used_bytes -= gone.size_bytes
        return gone

    def _grown(
        self, before: _Prompt, shared: int, text: str, tokens: array[int], new: Sequence[Cut]
    ) -> _Prompt | None:
        """The prompt that goes on behind the shared cuts of another, which is used up: what they
        have in common may be long, and is not written again. None: it has no cuts."""
        cuts, parts = [*before.cuts[:shared], *new], list(before.parts[:shared])
        if not cuts:
            return None
        ends = [cut.chars + self._ahead for cut in cuts[shared:]]
        begin = cuts[shared - 1].chars + self._ahead if shared else 0
        parts += [text[begin:end] for begin, end in itertools.pairwise([begin, *ends])]
        if len(cuts) > _MOST_CUTS:
            first = len(cuts) - _LEAST_CUTS
            cuts, parts = cuts[first:], ["".join(parts[: first + 1]), *parts[first + 1 :]]
        held, common = before.tokens, before.cuts[shared - 1].tokens if shared else 0
        held[common:] = tokens[common:]
        size = sum(map(sys.getsizeof, parts)) + sys.getsizeof(held)
        size = ENTRY_BYTES + size * 9 // 8
        return _Prompt(before.space, tuple(parts), held, tuple(cuts), size)
