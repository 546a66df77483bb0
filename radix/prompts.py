"""Prompts that were tokenized, to go on from where one of them ends: an agent's prompt is the one
before it and a little more.

A prompt is known with its last few cuts: places where its tokens so far depend on nothing behind,
once `ahead` further characters are known to be the same. The next prompt of the same conversation
parts from it somewhere in what was written behind the last turn, and goes on from the cut before.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

# What a prompt takes beside its text and its tokens.
ENTRY_BYTES = 1_000
_MOST = 512
_PROBED_CHARS = 32


class Cut(NamedTuple):
    """A place in a prompt: so many characters are so many tokens, and `before` ends there."""

    chars: int
    tokens: int
    before: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    space: str
    text: str
    tokens: array[int]
    cuts: tuple[Cut, ...]

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + sys.getsizeof(self.text) + len(self.tokens) * self.tokens.itemsize


class Begun(NamedTuple):
    """The beginning of a prompt, up to a cut, with its tokens; `number`: where it is known from."""

    cut: Cut
    tokens: array[int]
    number: int


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
            known = list(self._prompts.items())
        for number, prompt in reversed(known):
            cut = self._shared(prompt, text) if prompt.space == space else None
            if cut is not None:
                return Begun(cut, prompt.tokens[: cut.tokens], number)
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

        cuts: some of the prompt's, ascending.
        """
        prompt = _Prompt(space, text, tokens, tuple(cuts))
        if not cuts or prompt.size_bytes > self.limit_bytes:
            return
        with self._lock:
            if begun is not None:
                self._drop(begun.number)
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

    def _drop(self, number: int) -> None:
        gone = self._prompts.pop(number, None)
        if gone is not None:
            self.used_bytes -= gone.size_bytes

    def _shared(self, prompt: _Prompt, text: str) -> Cut | None:
        """The last cut up to which, and enough behind it, a text is the same."""
        for cut in reversed(prompt.cuts):
            end = cut.chars + self._ahead
            if end > min(len(text), len(prompt.text)):
                continue
            probe = slice(max(0, end - _PROBED_CHARS), end)
            if text[probe] == prompt.text[probe] and text[:end] == prompt.text[:end]:
                return cut
        return None
