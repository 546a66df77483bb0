"""Whether an agent's request is sent to a worker now, or is held back.

When the agents of a worker need more memory than it has, each of them finds its prefix evicted when
it comes back, and the worker computes the same prompts again and again. To hold a few back is
better: the others go on from the cache, end sooner, and make room (Denning's working-set principle
of 1968; for agents' programs, ThunderAgent).

A request is sent if any of these holds, and otherwise held back:

    1. the worker has time: it is idle; or nothing waits for its prefill, and it has spent less than
       BUSY_FROM of the last seconds on prefill. Then computing a prompt again costs others little
    2. most of the prompt is in memory
    3. it takes little memory of agents that are expected back: there are none, it is small, or all
       that agents there count with fits with it. Less important ones of its tenant do not count. A
       size beyond the whole memory is wrong, and counts as small
    4. its tenant's agents, with this one, fit into the tenant's part of the memory, or the tenant
       has no other agent there
    5. it has waited for `hold_s`

By 4 nothing that other tenants send or claim holds an agent back that is within its tenant's part:
the tenant's weight, divided by the weights of all tenants with agents there. And nothing that a
client claims, its priority included, gives its tenant memory that others use. By 1 and 5 nothing
starves, and no worker is idle because of a wrong estimate.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scheduler.averages import DecayingSum
from scheduler.capacity import is_at_hand

SPAN_S = 10.0
_SPEED_SPAN_S = 120.0
_LEAST_S = 0.05
"""Of less prefill the speed is not known."""


class PrefillPace:
    """Of one worker."""

    def __init__(self) -> None:
        self._totals: tuple[int, int] | None = None
        self._busy_s = DecayingSum(SPAN_S)
        self._tokens, self._tokens_s = DecayingSum(_SPEED_SPAN_S), DecayingSum(_SPEED_SPAN_S)
        self.tokens_per_s = 0.0

    def report(self, tokens: int, busy_ms: int, now_s: float) -> None:
        """Takes over the totals: tokens that were computed, and what that took."""
        before, self._totals = self._totals, (tokens, busy_ms)
        if before is None or tokens < before[0] or busy_ms < before[1]:
            return  # it has just been started
        took_s = (busy_ms - before[1]) / 1000
        self._busy_s.add(took_s, now_s)
        self._tokens.add(tokens - before[0], now_s)
        self._tokens_s.add(took_s, now_s)
        if (seconds := self._tokens_s.at(now_s)) >= _LEAST_S:
            self.tokens_per_s = self._tokens.at(now_s) / seconds

    def share(self, now_s: float) -> float:
        """The share of the last seconds that went into prefill."""
        return min(self._busy_s.at(now_s) / SPAN_S, 1.0)

    def seconds_of(self, tokens: float) -> float:
        """How long it takes to compute so many tokens; 0 if that is not known."""
        return tokens / self.tokens_per_s if self.tokens_per_s > 0 else 0.0


BUSY_FROM = 0.5
SMALL_SHARE = 0.01
"""What takes less of a worker's memory is small."""


class Demand(NamedTuple):
    """What a request needs.

    prompt_tokens: all of it. held_tokens: those that the worker has, on any tier.
    own_tokens: those that no other agent has.
    """

    tenant: str
    prompt_tokens: int
    held_tokens: int
    own_tokens: int


class Pool(NamedTuple):
    """The memory of a worker that has no time.

    tokens: how many it can keep. used: what its agents count with, without the one that asks, by
        tenant. less_important: of that, those of the same tenant with a lower priority. awaited: of
        that, those whose memory is worth keeping until they are back.
    """

    tokens: float
    used: Mapping[str, int]
    less_important: int
    awaited: int


def has_time(in_flight: int, pending_tokens: int, prefill_share: float) -> bool:
    """Whether a worker can compute a prompt without making others wait for long.

    in_flight: requests there now. pending_tokens: those that wait for its prefill. prefill_share:
        of the last seconds, what it has spent on prefill.
    """
    return not in_flight or (pending_tokens <= 0 and prefill_share < BUSY_FROM)


def pool_tokens(device_tokens: int, host_tokens: int, load_share: float) -> float:
    """What a worker can keep. The host has a copy of what is on the device, so only the rest of its
    memory counts. load_share: what a token costs that is loaded from there, as a share of one that
    is computed: a token on the host saves the rest."""
    return device_tokens + max(1.0 - load_share, 0.0) * max(host_tokens - device_tokens, 0)


def is_sent(
    demand: Demand,
    pool: Pool,
    waited_s: float,
    hold_s: float,
    weights: Mapping[str, float] = {},
) -> bool:
    """Whether a request is sent to a worker that has no time. weights: the tenants' shares; 1 for
    a missing one."""
    if not pool.awaited or waited_s >= hold_s:
        return True
    if is_at_hand(demand.prompt_tokens, demand.held_tokens):
        return True
    if not SMALL_SHARE * pool.tokens <= demand.own_tokens <= pool.tokens:
        return True
    if sum(pool.used.values()) - pool.less_important + demand.own_tokens <= pool.tokens:
        return True
    tenants = {tenant for tenant, tokens in pool.used.items() if tokens > 0} | {demand.tenant}
    part = weights.get(demand.tenant, 1.0) / sum(weights.get(one, 1.0) for one in tenants)
    own = pool.used.get(demand.tenant, 0)
    return own <= 0 or own + demand.own_tokens <= part * pool.tokens


TYPICAL_TOKENS = 50_000
"""What an agent is taken to need while none is there."""


def agents_that_fit(free_tokens: Iterable[float], used_tokens: float, agents: int) -> int:
    """How many more agents have room, if they are like those that are there.

    free_tokens: of each worker's memory; an agent is at one worker, so rests do not add up.
    used_tokens: what all `agents` count with.
    """
    typical = used_tokens / agents if agents and used_tokens > 0 else TYPICAL_TOKENS
    return sum(int(free // typical) for free in free_tokens if free > 0)
