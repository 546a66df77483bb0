"""How much memory each worker's agents use: those that compute, and those worth waiting for.

    request             answer          lease ends
      |----- computes -----|----- away -----|   gone: its memory is free for others
                           |-- away --|         its next request: it is in the set all the time

An agent that is away is awaited if

- it has come back before, or most agents of its tenant do,
- it is usually away for less time than its worker takes to compute all that fits into its memory:
  what is awaited for longer could have been computed again meanwhile.

A lease is as long as nine in ten of its gaps (`Habits`). An agent that is
awaited counts with a quarter more, for what it adds until it is back. Another one counts while it
computes. An agent counts without the tokens that a worker had when it began: so what many share
counts once.

Whatever a client says, an agent that computes is in the set. An agent has the priority of its last
request.
"""

from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec
from cachetools import LRUCache

from scheduler.returns import LEAST_GAPS, LONGEST_S

_LATEST = 32  # gaps, of each agent and of each tenant
_MOST_COUNTED = 128.0
# Gaps that are expected while few were seen.
_USUAL_GAPS = (0.3, 2.0, 10.0, 60.0)


class Absence(NamedTuple):
    """Half of an agent's gaps end within `soon_s`, and nine in ten within `late_s`."""

    soon_s: float
    late_s: float


class Habits:
    """Of one tenant, so that nothing that a client states changes what is expected of others."""

    def __init__(self) -> None:
        self._gaps: tuple[float, ...] = ()
        self._back = self._gone = 0.0

    def absence(self, own: tuple[float, ...]) -> Absence:
        """What is expected of a gap that begins. own: the agent's latest gaps. If those are few,
        the tenant's count in their place."""
        known = own if len(own) >= LEAST_GAPS else self._gaps
        gaps = sorted(known if len(known) >= LEAST_GAPS else (*known, *_USUAL_GAPS))
        return Absence(gaps[len(gaps) // 2], gaps[len(gaps) * 9 // 10])

    def note_gap(self, own: tuple[float, ...], gap_s: float) -> tuple[float, ...]:
        """Notes how long an agent was away. own: as above; returns them with this one."""
        gap_s = min(max(gap_s, 0.0), LONGEST_S)
        self._gaps = (*self._gaps, gap_s)[-_LATEST:]
        return (*own, gap_s)[-_LATEST:]

    def note(self, *, is_back: bool) -> None:
        """Counts an agent that came back after its first answer, or did not. Older ones count less
        and less."""
        self._back, self._gone = self._back + is_back, self._gone + (not is_back)
        if self._back + self._gone > _MOST_COUNTED:
            self._back, self._gone = self._back / 2, self._gone / 2

    @property
    def share_back(self) -> float:
        """The share that comes back; 0 before any did."""
        return self._back / (self._back + self._gone + 1.0)


LIMIT = 16_384
LEAST_LEASE_S, MOST_LEASE_S = 1.0, 60.0
GROWTH = 1.25
_MOST_TENANTS = 256


class _Agent(msgspec.Struct, gc=False):
    """shared_tokens: those of its first prompt that a worker held. habits: its tenant's. gaps: its
    own latest ones. tokens: what it counts with now. in_flight: its requests. has_returned: it
    sent one after an answer. lease_s: how long it is awaited, as of its last answer; 0 if it is
    not. leaves_s: when it leaves, unless it sends a request."""

    tenant: str
    worker: int
    shared_tokens: int
    habits: Habits
    gaps: tuple[float, ...] = ()
    priority: int = 0
    own_tokens: int = 0
    tokens: int = 0
    in_flight: int = 0
    is_awaited: bool = False
    has_returned: bool = False
    lease_s: float = 0.0
    answered_s: float = 0.0
    leaves_s: float = 0.0


class WorkingSet:
    """The agents of all workers, at most `limit`: of more, the tenant that has most loses the one
    that is silent for longest."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._agents: dict[int, _Agent] = {}
        self._members: dict[str, OrderedDict[int, None]] = {}
        self._habits: LRUCache[str, Habits] = LRUCache(_MOST_TENANTS)
        # By worker: what agents count with, by priority and tenant; and of that, those awaited.
        self._tokens: dict[int, Counter[tuple[int, str]]] = {}
        self._awaited: Counter[int] = Counter()
        self._leaving: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, agent: int) -> bool:
        return agent in self._agents

    def used(self, worker: int, besides: int) -> Counter[str]:
        """What each tenant's agents count with at a worker, without one agent."""
        found: Counter[str] = Counter()
        for (_, tenant), tokens in self._tokens.get(worker, {}).items():
            found[tenant] += tokens
        one = self._agents.get(besides)
        if one is not None and one.worker == worker:
            found[one.tenant] -= one.tokens
        return found

    def counted(self) -> int:
        """How many agents count with something, at any worker."""
        return sum(one.tokens > 0 for one in self._agents.values())

    def less_important(self, worker: int, tenant: str, priority: int, besides: int) -> int:
        """What those of a tenant's agents count with that have a lower priority, without one."""
        here = self._tokens.get(worker, {}).items()
        found = sum(n for (level, owner), n in here if owner == tenant and level < priority)
        one = self._agents.get(besides)
        if one is None or (one.worker, one.tenant) != (worker, tenant) or one.priority >= priority:
            return found
        return found - one.tokens

    def awaited(self, worker: int, besides: int) -> int:
        """What agents that are awaited count with at a worker, without one agent."""
        one = self._agents.get(besides)
        is_one = one is not None and one.worker == worker and one.is_awaited
        return self._awaited[worker] - (one.tokens if one is not None and is_one else 0)

    def own_tokens(self, agent: int, prompt_tokens: int, held_tokens: int) -> int:
        """Those of a prompt that no other agent has. held_tokens: those that a worker has."""
        one = self._agents.get(agent)
        return max(prompt_tokens - (held_tokens if one is None else one.shared_tokens), 0)

    def begin(
        self,
        agent: int,
        tenant: str,
        worker: int,
        prompt_tokens: int,
        held_tokens: int,
        now_s: float,
        priority: int = 0,
        refill_s: float = 0.0,
    ) -> None:
        """An agent's request goes to a worker.

        held_tokens: those of its prompt that the worker has. refill_s: how long the worker takes to
            compute all that fits into its memory; 0 if that is not known, and then none is awaited.
        """
        self.expire(now_s)
        one = self._agents.get(agent)
        if one is None or one.tenant != tenant:
            self._forget(agent)
            shared_tokens = min(held_tokens, prompt_tokens)
            one = _Agent(tenant, worker, shared_tokens, self._habits_of(tenant))
            self._agents[agent] = one
            one.lease_s = _lease_s(one, refill_s)
            self._members.setdefault(tenant, OrderedDict())[agent] = None
            if len(self._agents) > self.limit:
                largest = max(self._members.values(), key=len)
                self._forget(next(iter(largest)))
        elif not one.in_flight:
            _note_return(one, now_s)
        one.own_tokens = self.own_tokens(agent, prompt_tokens, held_tokens)
        one.in_flight += 1
        self._set(one, worker, priority, is_awaited=one.lease_s > 0)
        self._members[tenant].move_to_end(agent)

    def end(
        self, agent: int, now_s: float, refill_s: float = 0.0, *, is_last: bool = False
    ) -> None:
        """A request of an agent has ended. is_last: its client says that none follows."""
        one = self._agents.get(agent)
        if one is None or not one.in_flight:
            return
        one.in_flight -= 1
        if one.in_flight:
            return
        if is_last:
            self._forget(agent)
            return
        one.lease_s = _lease_s(one, refill_s)
        self._set(one, one.worker, one.priority, is_awaited=one.lease_s > 0)
        one.answered_s = now_s
        # One that has never come back is waited for, to learn whether its tenant's agents do.
        one.leaves_s = now_s + max(one.lease_s, 0.0 if one.has_returned else MOST_LEASE_S)
        heappush(self._leaving, (one.leaves_s, agent))
        if len(self._leaving) > 2 * len(self._agents) + 64:
            self._leaving = [*{each for each in self._leaving if self._is_leaving(*each)}]
            heapify(self._leaving)

    def waits(self, agent: int) -> None:
        """An agent's request is held back, and its memory is free for others."""
        one = self._agents.get(agent)
        if one is not None and not one.in_flight:
            self._set(one, one.worker, one.priority, is_awaited=False)

    def expire(self, now_s: float) -> None:
        """Takes the agents out of the set whose leases have ended."""
        while self._leaving and self._leaving[0][0] <= now_s:
            leaves_s, agent = heappop(self._leaving)
            if self._is_leaving(leaves_s, agent):
                one = self._agents[agent]
                self._set(one, one.worker, one.priority, is_awaited=False)
                if not one.has_returned:
                    one.habits.note(is_back=False)

    def forget_worker(self, worker: int) -> None:
        """A worker is gone, with what it held."""
        for agent in [name for name, one in self._agents.items() if one.worker == worker]:
            self._forget(agent)

    def _habits_of(self, tenant: str) -> Habits:
        found = self._habits.get(tenant)
        if found is None:
            found = self._habits[tenant] = Habits()
        return found

    def _is_leaving(self, leaves_s: float, agent: int) -> bool:
        one = self._agents.get(agent)
        return one is not None and not one.in_flight and one.leaves_s == leaves_s

    def _set(self, one: _Agent, worker: int, priority: int, *, is_awaited: bool) -> None:
        """Counts an agent there: if it is awaited with what it adds, else while it computes."""
        self._add(one, -one.tokens)
        one.worker, one.priority, one.is_awaited = worker, priority, is_awaited
        one.tokens = one.own_tokens if one.in_flight else 0
        if is_awaited:
            one.tokens = int(GROWTH * one.own_tokens)
        self._add(one, one.tokens)

    def _add(self, one: _Agent, tokens: int) -> None:
        if not tokens:
            return
        here = self._tokens.get(one.worker)
        if here is None:
            here = self._tokens[one.worker] = Counter()
        kind = one.priority, one.tenant
        here[kind] += tokens
        if not here[kind]:
            del here[kind]
        if not here:
            del self._tokens[one.worker]
        if one.is_awaited:
            self._awaited[one.worker] += tokens
            if not self._awaited[one.worker]:
                del self._awaited[one.worker]

    def _forget(self, agent: int) -> None:
        one = self._agents.get(agent)
        if one is None:
            return
        self._add(one, -one.tokens)
        del self._agents[agent]
        members = self._members[one.tenant]
        del members[agent]
        if not members:
            del self._members[one.tenant]

    def check(self) -> None:
        """Asserts the invariants."""
        assert len(self) <= self.limit
        assert sum(map(len, self._members.values())) == len(self)
        sums: dict[int, Counter[tuple[int, str]]] = {}
        awaited: Counter[int] = Counter()
        for name, one in self._agents.items():
            assert name in self._members[one.tenant]
            assert min(one.tokens, one.in_flight) >= 0
            if one.tokens:
                sums.setdefault(one.worker, Counter())[one.priority, one.tenant] += one.tokens
                awaited[one.worker] += one.tokens if one.is_awaited else 0
        assert sums == self._tokens
        assert +awaited == self._awaited
        assert len(self._leaving) <= 2 * len(self) + 64


def _lease_s(one: _Agent, refill_s: float) -> float:
    """How long an agent is awaited while it is away; 0 if it is not."""
    if not one.has_returned and one.habits.share_back < 0.5:
        return 0.0
    absence = one.habits.absence(one.gaps)
    if absence.soon_s >= refill_s:
        return 0.0
    return min(max(absence.late_s, LEAST_LEASE_S), MOST_LEASE_S, refill_s)


def _note_return(one: _Agent, now_s: float) -> None:
    one.gaps = one.habits.note_gap(one.gaps, now_s - one.answered_s)
    if not one.has_returned:
        one.habits.note(is_back=True)
    one.has_returned = True
