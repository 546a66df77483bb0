"""Simple policies, and those of other routers, for `bench/sim/virtual_time.py`.

RoundRobin      each worker in turn
Sticky          the worker where an agent began: it knows conversations by heart
StickyUntilSaturated
                the same, as llm-d's scheduler does it: an agent moves for good to the worker with
                the fewest requests under way when its own has more than twice the mean of them
CacheAware      sglang-router's default: the longest match by a tree of what was sent, if it is long
                enough, otherwise the worker with the smallest tree; by load where that differs much
LMetric         the least product of the tokens to prefill and the requests under way, by the
                engines' events
DynamoAgentic   the agentic preset of Dynamo's KV router, by the engines' events: four times the
                blocks to prefill, less twice those that are cached, and the blocks of all requests
                under way, and 64 for each of these
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from bench.sim.engine import Engine
from bench.sim.prompts import BYTES_PER_TOKEN
from bench.sim.segments import Line, apply_line
from bench.trace.calls import Call
from radix.index import PrefixIndex

# sglang-router's defaults.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD = 64, 1.5


class Counting:
    """A policy that counts the requests under way."""

    def __init__(self) -> None:
        self.under_way: Counter[int] = Counter()
        self._used_at: dict[int, float] = {}

    def begin(self, call: Call, worker: int, now: float) -> None:
        self.under_way[worker] += 1
        self._used_at[worker] = now

    def end(self, call: Call, worker: int, now: float) -> None:
        self.under_way[worker] -= 1

    def least(self, workers: Sequence[int]) -> int:
        """The worker with the fewest requests under way, the longest unused of them."""
        return min(workers, key=lambda each: (self.under_way[each], self._used_at.get(each, 0)))


class RoundRobin(Counting):
    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        self._next += 1
        there = range(len(engines))
        return there[self._next % len(there)]


class Sticky:
    """An agent stays where it began, with the fewest agents that began there."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        if call.agent not in self._home:
            agents = Counter(self._home.values())
            self._home[call.agent] = min(range(len(engines)), key=lambda each: agents[each])
        return self._home[call.agent]


class StickyUntilSaturated(Counting):
    FACTOR, LEAST = 2.0, 4

    def __init__(self) -> None:
        super().__init__()
        self._home: dict[int, int] = {}

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        there = range(len(engines))
        home = self._home.get(call.agent)
        mean = sum(self.under_way[worker] for worker in there) / len(there)
        most = max(self.FACTOR * mean, self.LEAST)
        if home is None or self.under_way[home] > most:
            home = self._home[call.agent] = self.least(there)
        return home


class CacheAware(Counting):
    """Its tree is exact and never evicts, which flatters it."""

    def __init__(self) -> None:
        super().__init__()
        self._index = PrefixIndex(2_000_000)
        self._tree: Counter[int] = Counter()

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        there = range(len(engines))
        loads = [self.under_way[worker] for worker in there]
        most, least = max(loads), min(loads)
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            return self.least(there)
        hashes, ends = call.chain.hashes, call.chain.ends
        for match in self._index.matches(hashes):
            holders = [worker for worker in there if match.workers >> worker & 1]
            if holders and ends[match.depth - 1] > CACHE_THRESHOLD * ends[-1]:
                return holders[0]
        return min(there, key=lambda worker: self._tree[worker])

    def begin(self, call: Call, worker: int, now: float) -> None:
        super().begin(call, worker, now)
        parent, before = None, 0
        for segment, end in zip(call.chain.hashes, call.chain.ends, strict=True):
            if not self._index.holds(worker, segment):
                self._index.store(worker, parent, segment, end)
                self._tree[worker] += end - before
            parent, before = segment, end


class ByEvents(Counting, ABC):
    """The worker of the least cost. It knows what engines hold by their events, and what they still
    have to prefill until a request's first token."""

    def __init__(self) -> None:
        super().__init__()
        self._index = PrefixIndex(2_000_000)
        self.pending: Counter[int] = Counter()
        self._uncached: dict[tuple[int, int], int] = {}

    @abstractmethod
    def cost(self, call: Call, worker: int, held_tokens: int) -> float:
        """What a call costs on a worker that holds so much of its prompt."""

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        held: dict[int, int] = {}
        for match in self._index.matches(call.chain.hashes):
            mask = match.workers
            while mask:
                low = mask & -mask
                held[low.bit_length() - 1] = match.tokens
                mask ^= low

        def cost(worker: int) -> tuple[float, float]:
            return self.cost(call, worker, held.get(worker, 0)), self._used_at.get(worker, 0)

        worker = min(range(len(engines)), key=cost)
        self._uncached[call.agent, call.turn] = max(call.prompt_tokens - held.get(worker, 0), 0)
        return worker

    def begin(self, call: Call, worker: int, now: float) -> None:
        super().begin(call, worker, now)
        self.pending[worker] += self._uncached[call.agent, call.turn]

    def first_byte(self, call: Call, worker: int, now: float) -> None:
        self.pending[worker] -= self._uncached.pop((call.agent, call.turn))

    def event(self, worker: int, line: Line, now: float) -> None:
        apply_line(self._index, worker, line)


class LMetric(ByEvents):
    def cost(self, call: Call, worker: int, held_tokens: int) -> float:
        uncached = max(call.prompt_tokens - held_tokens, 1)
        return (self.pending[worker] + uncached) * (self.under_way[worker] + 1)


class DynamoAgentic(ByEvents):
    """Blocks that requests under way share count once, as its router tracks active blocks."""

    BLOCK_TOKENS, CREDIT, PREFILL_SCALE, REQUEST_WEIGHT = 16, 2.0, 4.0, 64.0

    def __init__(self) -> None:
        super().__init__()
        self._active: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._active_tokens: Counter[int] = Counter()

    def cost(self, call: Call, worker: int, held_tokens: int) -> float:
        prefill = self.pending[worker] + call.prompt_tokens - self.CREDIT * held_tokens
        active = self._active_tokens[worker]
        active += sum(tokens for _, tokens in self._more(call, worker))
        blocks = (self.PREFILL_SCALE * prefill + active) / self.BLOCK_TOKENS
        return blocks + self.REQUEST_WEIGHT * self.under_way[worker]

    def begin(self, call: Call, worker: int, now: float) -> None:
        super().begin(call, worker, now)
        self._active_tokens[worker] += sum(tokens for _, tokens in self._more(call, worker))
        self._active[worker].update(call.chain.hashes)

    def end(self, call: Call, worker: int, now: float) -> None:
        super().end(call, worker, now)
        active = self._active[worker]
        active.subtract(call.chain.hashes)
        for segment in call.chain.hashes:
            if not active[segment]:
                del active[segment]
        self._active_tokens[worker] -= sum(tokens for _, tokens in self._more(call, worker))

    def _more(self, call: Call, worker: int) -> Iterator[tuple[int, int]]:
        """The segments of a call that no request under way has there, and their tokens."""
        active, before = self._active[worker], 0
        for segment, end in zip(call.chain.hashes, call.chain.ends, strict=True):
            if segment not in active:
                yield segment, (end - before) // BYTES_PER_TOKEN
            before = end
