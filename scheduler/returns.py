"""When agents come back: how long they are away after an answer, and which are waited for.

    answer                              next request
      |------------------ gap ----------------->|
      |            ^ round 1          ^ round 2        when to load what was evicted: `rounds`

Each tool has its latest gaps: of this agent if there are some, else of all agents of the tenant. A
tool may run for a second or for an hour, so nothing is assumed of the shape of gaps: what is
expected is read from the gaps themselves.

A client's own figures, how long each tool ran, tell tools apart that ran side by side. The gap
also contains what the client does itself, so the tool that took longest counts as all of it.

While tools run, other requests may take a session's device memory, and its prefix stays in
host memory alone. It is loaded back before its next turn comes, so that the turn need not wait:
once in each round of its tools' gaps (`Gaps`). A load that is late costs the
client a wait. A load that is early costs room among prefixes that may be evicted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from cachetools import FIFOCache

LONGEST_S = 900.0
"""Longer gaps count as this: an agent that stays away for longer is not expected any more."""
LEAST_GAPS = 4
"""Of fewer gaps little can be read."""
MOST_TOOLS, MOST_NAME = 32, 128
_USUAL_S = 10.0  # what a tool without gaps counts as, beside others

LATE_SHARE = 1 / 8
FACTOR = 3.0
MOST_ROUNDS = 3
LEAST_S = 1.0
"""Shorter gaps have no round: nothing is evicted so soon."""


def rounds(gaps: Iterable[float]) -> tuple[float, ...]:
    """The times after an answer at which an agent with such gaps is expected, ascending.

    At each of them one gap in eight has ended: of all gaps, and after that of those that are at
    least FACTOR times as long as the round before. Many tools are short most times and long at
    others.
    """
    found: list[float] = []
    left = sorted(gap for gap in gaps if LEAST_S <= gap < LONGEST_S)
    while left and len(found) < MOST_ROUNDS:
        found.append(left[max(int((len(left) + 1) * LATE_SHARE) - 1, 0)])
        left = [gap for gap in left if gap >= FACTOR * found[-1]]
    return tuple(found)


class Gaps:
    """The latest gaps of one tenant's agents, so that nothing that a client states changes what is
    expected of another tenant. The entry that was noted longest ago is forgotten.

    limit: of entries, two for each tool of an agent. latest: how many gaps an entry has.
    """

    def __init__(self, limit: int = 1024, latest: int = 32) -> None:
        self._latest = latest
        self._entries: FIFOCache[tuple[str, str], tuple[float, ...]] = FIFOCache(limit)

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, agent: str, tool: str) -> tuple[float, ...]:
        """The gaps of this agent's tool, or if those are fewer than LEAST_GAPS, of all agents'."""
        tool = tool[:MOST_NAME]
        own = self._entries.get((agent, tool), ())
        return own if len(own) >= LEAST_GAPS else self._entries.get(("", tool), ())

    def note(
        self, agent: str, tools: Collection[str], gap_s: float, stated_s: Mapping[str, float]
    ) -> None:
        """Notes how long an agent was away.

        tools: those that its answer called. stated_s: how long each ran, as far as the client says.
        The longest of them took all of the gap, and no other one more than that.
        """
        gap_s = min(max(gap_s, 0.0), LONGEST_S)
        tools = list(tools)[:MOST_TOOLS]
        took_s = {tool: min(max(stated_s[tool], 0.0), gap_s) for tool in tools if tool in stated_s}

        def length(tool: str) -> tuple[float, float]:
            known = sorted(self.of(agent, tool))
            return took_s.get(tool, -1.0), known[len(known) // 2] if known else _USUAL_S

        if tools:
            took_s[max(tools, key=length)] = gap_s
        for tool, each_s in took_s.items():
            for key in ((agent, tool[:MOST_NAME]), ("", tool[:MOST_NAME])):
                latest = (*self._entries.pop(key, ()), each_s)[-self._latest :]
                self._entries[key] = latest


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


class LastTurns(Generic[Prompt]):
    """The latest turn of each session, in the order in which the sessions are expected back. Of too
    many sessions, the one whose turn ended longest ago is forgotten."""

    def __init__(self, limit: int = 4096) -> None:
        self._turns: FIFOCache[str, tuple[Prompt, float, float]] = FIFOCache(limit)

    def ended(self, session: str, prompt: Prompt, sent_s: float, now_s: float) -> None:
        """Notes that a turn was sent and has ended now."""
        _, ended_s, usual_s = self._turns.pop(session, (prompt, sent_s, 0.0))
        gap_s = max(sent_s - ended_s, 0.0)
        self._turns[session] = prompt, now_s, (usual_s + gap_s) / 2 if usual_s else gap_s

    def forget(self, session: str) -> None:
        self._turns.pop(session, None)

    def clear(self) -> None:
        self._turns.clear()

    def soonest_first(self, now_s: float) -> list[Prompt]:
        """The prompts. A session counts as away for as long as it usually is, or as it has been if
        that is longer."""
        turns = sorted(self._turns.values(), key=lambda turn: max(turn[2], now_s - turn[1]))
        return [prompt for prompt, _, _ in turns]


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
