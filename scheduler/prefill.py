"""What is prefilled before it is asked for: when, how much at once, and for whom.

A prompt is prefilled ahead in slices, each a request of its own that the cache lets go on where
the one before it ended. A slice runs only

    while nothing else runs or waits       so it delays what comes meanwhile by one slice
    into memory that nobody misses         so it evicts nothing that may be asked for again
    if it is new, and no longer than that  so what is cached already costs no forward pass

and is refused at once otherwise: nothing ever waits in the engine to be prefilled ahead. What a
refusal says, and how much was found cached, decides what is sent next.

Whether a session's next turn is worth guessing shows in the guesses before it.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum


class Refusal(StrEnum):
    """Why a slice does not run now."""

    BUSY = "busy"
    NOTHING = "nothing"
    WIDE = "wide"
    MEMORY = "memory"


def least_tokens(page: int) -> int:
    """How many tokens a slice adds, or it adds nothing that is worth to be found again."""
    return max(page, 16)


def refusal(
    *, is_idle: bool, new_tokens: int, page: int, slice_tokens: int, free_tokens: int
) -> Refusal | None:
    """Why a slice that would add `new_tokens` to the cache may not run now; None if it may."""
    if not is_idle:
        return Refusal.BUSY
    if new_tokens < least_tokens(page):
        return Refusal.NOTHING
    if new_tokens > slice_tokens:
        return Refusal.WIDE
    if new_tokens > free_tokens:
        return Refusal.MEMORY
    return None


def slice_end(total_tokens: int, cached_tokens: int, slice_tokens: int, page: int) -> int:
    """Where the next slice of a prompt ends of which so many tokens are cached: at the end of a
    page, or of the prompt.

    What is read of a prompt is told with its last slice: so none is left that would be refused
    as too short, where two slices have room for one of it.
    """
    end = (cached_tokens + slice_tokens) // page * page
    if end >= total_tokens:
        return total_tokens
    sooner = (total_tokens - least_tokens(page)) // page * page
    return min(end, sooner) if sooner > cached_tokens else max(end, page)


class GuessHistory:
    """How often each session's next turn was what was guessed; of `limit` sessions, at most.

    A session gets two guesses, and goes on getting them while half of the latest were right.
    """

    _LATEST = 8

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._right: OrderedDict[str, tuple[bool, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._right)

    def note(self, session: str, *, is_right: bool) -> None:
        """A guess was right, or it was not: the next turn was another one."""
        latest = (*self._right.pop(session, ()), is_right)[-self._LATEST :]
        self._right[session] = latest
        if len(self._right) > self._limit:
            self._right.popitem(last=False)

    def is_worth(self, session: str) -> bool:
        """Whether the session's next turn should be guessed."""
        latest = self._right.get(session, ())
        return len(latest) < 2 or 2 * sum(latest) >= len(latest)
