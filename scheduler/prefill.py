"""Which parts of a prompt are prefilled before a request needs them, and when.

A prompt is prefilled ahead in slices. Each slice is a request of its own, and the cache lets it
continue where the slice before it ended. A slice runs only

    while nothing else runs or waits       so it delays a new request by one slice at most
    into free memory and a small share     so it evicts little that may be used again: a busy
    of what could be evicted               engine's memory is always full of cache
    if its new tokens fit one slice        so cached tokens cost no forward pass, and tokens in the
                                           host's memory, however many, a load

Otherwise it is rejected at once: no slice waits in the engine. The reason and the number of
cached tokens in a rejection decide the next slice.

Whether to guess a session's next turn depends on how often its earlier guesses were right.
"""

from enum import StrEnum

from cachetools import FIFOCache


class Rejection(StrEnum):
    """Why a slice may not run now."""

    BUSY = "busy"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    MEMORY = "memory"
    UNSUPPORTED = "unsupported"
    """No slice ever runs: the cache cannot use a part of a prompt by itself."""
    UNHELD = "unheld"
    """The scheduler has only the end of the slice: the whole prompt must be sent again."""


def least_tokens(page: int) -> int:
    """The fewest new tokens that make a slice worth a forward pass."""
    return max(page, 16)


def rejection(
    *, new_tokens: int, page: int, slice_tokens: int, free_tokens: int, loaded_tokens: int = 0
) -> Rejection | None:
    """Why a slice may not run on an idle engine; None if it may.

    new_tokens: so many of it are not on the device, and need memory there.
    loaded_tokens: so many of these are not computed but loaded from the host.
    """
    if new_tokens < least_tokens(page):
        return Rejection.TOO_SHORT
    if new_tokens - loaded_tokens > max(slice_tokens, page):
        return Rejection.TOO_LONG
    if new_tokens > free_tokens:
        return Rejection.MEMORY
    return None


def takeable_tokens(
    *, worthless_tokens: int, evictable_tokens: int, ahead_tokens: int, most: int
) -> int:
    """How many tokens a slice may take from prefixes that a request might read.

    worthless_tokens: prefixes that are evicted first, as no request is expected to read them;
        what was guessed and is unread is a part of them.
    evictable_tokens: all prefixes that could be evicted, the worthless among them. Pinned ones
        are not.
    ahead_tokens: what was computed ahead and is unread.
    most: so much that is unread may have taken the place of other prefixes. Beyond it, what is
        computed ahead takes the place of what was computed ahead before.
    """
    others = max(evictable_tokens - worthless_tokens, 0)
    return min(max(most - ahead_tokens, 0), others)


def slice_end(total_tokens: int, cached_tokens: int, slice_tokens: int, page: int) -> int:
    """Where a prompt's next slice ends: at the end of a page, or of the prompt. A slice has a page
    at least, as the cache keeps no part of one.

    Only a prompt's last slice reports its cached tokens. So the slice before it ends early enough
    to leave a last slice that is not rejected as too short.
    """
    end = (cached_tokens + max(slice_tokens, page)) // page * page
    if end >= total_tokens:
        return total_tokens
    sooner = (total_tokens - least_tokens(page)) // page * page
    return min(end, sooner) if sooner > cached_tokens else max(end, page)


class GuessHistory:
    """How often guesses of each session's next turn were right, for at most `limit` sessions.

    A session's first two turns are guessed, and later ones while half of its last guesses were
    right.
    """

    _LATEST = 8

    def __init__(self, limit: int = 4096) -> None:
        self._right: FIFOCache[str, tuple[bool, ...]] = FIFOCache(limit)

    def note(self, session: str, *, is_right: bool) -> None:
        """Records whether the next turn was the one guessed."""
        self._right[session] = (*self._right.get(session, ()), is_right)[-self._LATEST :]

    def should_guess(self, session: str) -> bool:
        """Whether to guess the session's next turn."""
        latest = self._right.get(session, ())
        return len(latest) < 2 or 2 * sum(latest) >= len(latest)
