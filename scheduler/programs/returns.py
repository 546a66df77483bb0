"""When a session comes back whose turn ended with tool calls, and which sessions are waited for.

While its tools run, other requests may take the session's device memory, and its prefix stays in
host memory alone. It is loaded back before its next turn comes, so that the turn need not wait:
once in each round of its tools' gaps (`scheduler.programs.gaps`). A load that is late costs the
client a wait. A load that is early costs room among prefixes that may be evicted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from cachetools import FIFOCache

from scheduler.programs.gaps import LEAST_GAPS, LONGEST_S, Gaps, rounds

LEAD_S = 0.5
"""A load begins so long before its round."""
PRIOR = (2.0, 20.0)
_LATEST = 16
_MOST_TENANTS, _MOST_ENTRIES = 64, 512

Prompt = TypeVar("Prompt")


class UsualGaps:
    """The gaps of each tenant. Of too many tenants, the one that was noted longest ago is
    forgotten."""

    def __init__(self) -> None:
        self._tenants: FIFOCache[str, Gaps] = FIFOCache(_MOST_TENANTS)

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def rounds(self, owner: str, session: str, tools: Collection[str]) -> tuple[float, ...]:
        """When a session comes back that runs these tools side by side: as the longest does. () if
        that is too soon to matter."""
        known = self._tenants.get(owner) or Gaps()
        found = (known.of(session, tool) for tool in tools)
        return max((rounds(g if len(g) >= LEAST_GAPS else PRIOR) for g in found), default=())

    def note(
        self,
        owner: str,
        session: str,
        tools: Collection[str],
        gap_s: float,
        stated_s: Mapping[str, float],
    ) -> None:
        """Notes that a session came back. The arguments are those of `Gaps.note`."""
        gaps = self._tenants.pop(owner, None) or Gaps(_MOST_ENTRIES, _LATEST)
        gaps.note(session, tools, gap_s, stated_s)
        self._tenants[owner] = gaps  # it is the last to be forgotten


@dataclass(slots=True)
class Return(Generic[Prompt]):
    """A session that runs tools.

    rounds_s: those that are to come, after the answer. prompt: what is loaded; None after the last
    round. size_bytes: its memory. load: what the latest round began, in the terms of the caller.
    """

    owner: str
    tools: tuple[str, ...]
    answered_s: float
    rounds_s: tuple[float, ...]
    prompt: Prompt | None
    size_bytes: int
    load: Any = None

    @property
    def load_s(self) -> float:
        """When its prompt is to be loaded next."""
        return self.answered_s + self.rounds_s[0] - LEAD_S if self.rounds_s else inf

    def end_rounds(self, now_s: float) -> None:
        """Ends the rounds whose time has come, and drops the prompt after the last."""
        while self.load_s <= now_s:
            self.rounds_s = self.rounds_s[1:]
        if not self.rounds_s:
            self.prompt, self.size_bytes = None, 0


class Returns(Generic[Prompt]):
    """The sessions that run tools, and the prompts to load for them.

    A session counts as the size of its prompt, and as `limit_bytes / limit` at least. So there are
    at most `limit` sessions. Of too many, the tenant that has most loses its oldest.
    """

    def __init__(self, limit_bytes: int, limit: int) -> None:
        self.limit_bytes, self._least_bytes = limit_bytes, limit_bytes // limit
        self._waiting: dict[str, Return[Prompt]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def used_bytes(self) -> int:
        """What all sessions count as."""
        return sum(map(self._bytes, self._waiting.values()))

    def expect(self, session: str, one: Return[Prompt], now_s: float) -> int:
        """Expects a session; how many are not expected any more, to make room. Rounds that are over
        by now are left out."""
        one.end_rounds(now_s)
        self._waiting.pop(session, None)
        self._waiting[session] = one
        before = len(self._waiting)
        while self.used_bytes > self.limit_bytes:
            del self._waiting[self._oldest_of_largest()]
        return before - len(self._waiting)

    def came(self, session: str) -> Return[Prompt] | None:
        """Ends the wait for a session, because it came."""
        return self._waiting.pop(session, None)

    def due(self, now_s: float) -> list[tuple[Prompt, Return[Prompt]]]:
        """The prompts that are to be loaded now, each once a round."""
        found = []
        for one in self._waiting.values():
            if one.load_s <= now_s and one.prompt is not None:
                found.append((one.prompt, one))
                one.end_rounds(now_s)
        return found

    def expire(self, now_s: float) -> int:
        """Ends the wait for sessions that will not come any more; how many there were."""
        return self._drop(lambda one: now_s - one.answered_s >= LONGEST_S)

    def drop(self, are_meant: Callable[[Prompt], bool]) -> int:
        """Ends the wait for sessions whose prompts are meant; how many there were."""
        return self._drop(lambda one: one.prompt is not None and are_meant(one.prompt))

    def _drop(self, is_over: Callable[[Return[Prompt]], bool]) -> int:
        over = [name for name, one in self._waiting.items() if is_over(one)]
        for name in over:
            del self._waiting[name]
        return len(over)

    def _bytes(self, one: Return[Prompt]) -> int:
        return max(one.size_bytes, self._least_bytes)

    def _oldest_of_largest(self) -> str:
        shares: Counter[str] = Counter()
        for one in self._waiting.values():
            shares[one.owner] += self._bytes(one)
        largest = max(shares, key=lambda owner: shares[owner])
        return next(name for name, one in self._waiting.items() if one.owner == largest)
