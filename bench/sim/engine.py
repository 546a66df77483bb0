"""A simulated engine: SGLang's scheduling and cache by the clock it is given, no model.

An iteration is a prefill batch if anyone waits, else decode. A batch takes the
request whose prompt is half done first, then the queue in order, up to
`chunk_tokens` uncached tokens, free slots and memory, and lasts `prefill_base_s`
and a share a token. A request looks into the cache when it joins a batch, and what
a batch computed is held when it ends: two requests of one batch compute a shared
beginning twice. Decoding pauses while a batch runs; a step takes `decode_base_s`
and a share a running request. Attention's growth with the context is left out.

    waiting --batch--> prefilling --last chunk--> running --last token--> done
                          ^    |                  "first"                "done"
                          +----+ next chunk
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from bench.sim.cache import BlockCache
from bench.sim.prompts import BLOCK_TOKENS
from bench.sim.segments import Load, SegmentFeed
from scheduler.order import Waiting, in_order, window_of
from sgl_ext.reading.segments import Chain


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Times in seconds, sizes in tokens. aging_s: above 0, requests wait in the order of our
    engines, with this setting; else the first comes first."""

    capacity_tokens: int = 1_500_000
    max_running: int = 64
    prefill_tokens_per_s: float = 40_000.0
    prefill_base_s: float = 0.005
    chunk_tokens: int = 8192
    decode_base_s: float = 0.006
    decode_per_request_s: float = 0.000_1
    aging_s: float = 0.0

    def at_speed(self, speed: float) -> EngineConfig:
        """An engine with the same memory that computes at so much of the speed."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s * speed,
            prefill_base_s=self.prefill_base_s / speed,
            decode_base_s=self.decode_base_s / speed,
            decode_per_request_s=self.decode_per_request_s / speed,
        )


@dataclass(eq=False, slots=True)
class Request:
    """One generation. `keys` are the blocks of prompt and answer together, or more."""

    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    chain: Chain = field(default_factory=Chain)
    cached_tokens: int = 0
    computed: int = 0  # tokens of the prompt that are in memory
    reserved: int = 0  # blocks set aside for what is not held yet
    locked: int = 0  # how many of `keys` are locked
    expected: int = 0  # uncached tokens as seen on arrival, the engine's idea of what is pending
    arrived_s: float = 0.0

    @property
    def prompt_blocks(self) -> int:
        """Full blocks that may come from the cache: the last token is always computed."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS

    @property
    def all_blocks(self) -> int:
        return (self.prompt_tokens + self.output_tokens - 1) // BLOCK_TOKENS


class Event(NamedTuple):
    """A request's first token, or its end."""

    at: float
    kind: Literal["first", "done", "refused"]
    request: Request


class Engine:
    """`submit`, then `advance` to `next_at()` and beyond; times never go back."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.cache = BlockCache(self.config.capacity_tokens // BLOCK_TOKENS)
        self.segments = SegmentFeed()
        self.prefill_s = 0.0
        self.prefill_tokens = 0
        self.finished = 0
        self._waiting: deque[Request] = deque()
        self._batch: list[tuple[Request, int]] = []
        self._batch_ends = math.inf
        self._half_done: Request | None = None
        self._running: list[tuple[float, int, Request]] = []  # by the decode step that ends it
        self._steps = 0.0
        self._now = 0.0
        self._order = 0
        self._pending = 0

    @property
    def load(self) -> Load:
        used = self.cache.protected + self.cache.reserved
        running = len(self._running) + len(self._batch)
        return Load(
            running,
            len(self._waiting),
            self._pending,
            used * BLOCK_TOKENS,
            self.config.capacity_tokens,
            self.prefill_tokens,
            self.prefill_s,
        )

    def cached_tokens(self, request: Request) -> int:
        """How much of a prompt would come from the cache if it were computed now."""
        return self.cache.match(request.keys, request.prompt_blocks) * BLOCK_TOKENS

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queues a request. One that could never fit is refused at once."""
        if request.all_blocks + 2 > self.cache.capacity:
            return [Event(now, "refused", request)]
        events = self.advance(now)
        request.expected = request.prompt_tokens - self.cached_tokens(request)
        request.arrived_s = now
        self._pending += request.expected
        self._waiting.append(request)
        if not self._batch:
            self._start_batch()
        return events

    def next_at(self) -> float:
        """The time of the next event if no request is submitted; infinity if there is none."""
        if self._batch:
            return self._batch_ends
        if self._running:
            return self._now + max(0.0, self._running[0][0] - self._steps) * self._step_s()
        return math.inf

    def advance(self, now: float) -> list[Event]:
        """Runs until `now`; what happened, in order."""
        events: list[Event] = []
        while (at := self.next_at()) <= now:
            self._decode_until(at)
            if self._batch:
                self._end_batch(events)
            else:
                _, _, request = heapq.heappop(self._running)
                self._finish(request, events)
            self._start_batch()
        self._decode_until(now)
        return events

    def flush(self) -> None:
        """Forgets everything that no request is using."""
        self.segments.removed(self.cache.clear())

    def _step_s(self) -> float:
        return self.config.decode_base_s + self.config.decode_per_request_s * len(self._running)

    def _decode_until(self, now: float) -> None:
        if not self._batch and self._running:
            self._steps += (now - self._now) / self._step_s()
        self._now = now

    def _start_batch(self) -> None:
        budget = self.config.chunk_tokens
        if self._half_done is not None:
            budget -= self._join(self._half_done, budget)
            self._half_done = None
        if self.config.aging_s and len(self._waiting) > 1 and budget > 0:
            self._waiting = deque(self._in_order())
        while self._waiting and budget > 0:
            if len(self._running) + len(self._batch) >= self.config.max_running:
                break
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            budget -= self._join(request, budget)
        if self._batch:
            config = self.config
            tokens = sum(share for _, share in self._batch)
            lasts = config.prefill_base_s + tokens / config.prefill_tokens_per_s
            self.prefill_s += lasts
            self.prefill_tokens += tokens
            self._batch_ends = self._now + lasts

    def _in_order(self) -> list[Request]:
        queue, aging_s = [*self._waiting], self.config.aging_s
        costs = (one.prompt_tokens - self.cached_tokens(one) for one in queue)
        waiting = [Waiting(0, one.arrived_s, cost) for one, cost in zip(queue, costs, strict=True)]
        pending_s = sum(one.cost_tokens for one in waiting) / self.config.prefill_tokens_per_s
        window_s = window_of(pending_s, aging_s)
        return [queue[n] for n in in_order(waiting, self._now, aging_s, window_s=window_s)]

    def _join(self, request: Request, budget: int) -> int:
        share = min(budget, request.prompt_tokens - request.computed)
        self._batch.append((request, share))
        return share

    def _admit(self, request: Request) -> bool:
        """Takes memory for the whole request, as the cache stands now."""
        matched = self.cache.match(request.keys, request.prompt_blocks)
        if matched:
            self.cache.lock(request.keys[matched - 1])
        # One block more: the text beyond the last full one needs memory, too.
        needed = request.all_blocks - matched + 1
        enough, evicted = self.cache.reserve(needed)
        if not enough:
            if matched:
                self.cache.unlock(request.keys[matched - 1], self._now)
            return False
        self.segments.removed(evicted)
        request.locked, request.reserved = matched, needed
        request.computed = request.cached_tokens = matched * BLOCK_TOKENS
        self._pending += request.prompt_tokens - request.computed - request.expected
        return True

    def _end_batch(self, events: list[Event]) -> None:
        batch, self._batch, self._batch_ends = self._batch, [], math.inf
        for request, share in batch:
            request.computed += share
            self._pending -= share
            whole = request.computed == request.prompt_tokens
            done = request.prompt_blocks if whole else request.computed // BLOCK_TOKENS
            self._hold(request, done)
            self.segments.stored(request.chain, request.keys, done)
            if not whole:
                self._half_done = request
                continue
            events.append(Event(self._now, "first", request))
            if request.output_tokens <= 1:
                self._finish(request, events)
                continue
            self._order += 1
            ends = self._steps + request.output_tokens - 1
            heapq.heappush(self._running, (ends, self._order, request))

    def _hold(self, request: Request, blocks: int) -> None:
        """Moves what was computed from the reserve into the cache, under the request's lock."""
        if blocks <= request.locked:
            return
        # Freed before it is filled; a twin may have filled it already.
        self.cache.release(blocks - request.locked)
        request.reserved -= blocks - request.locked
        self.cache.insert(request.keys, request.locked, blocks, self._now)
        self.cache.lock(request.keys[blocks - 1])
        if request.locked:
            self.cache.unlock(request.keys[request.locked - 1], self._now)
        request.locked = blocks

    def _finish(self, request: Request, events: list[Event]) -> None:
        self._hold(request, request.all_blocks)
        self.cache.release(request.reserved)
        if request.locked:
            self.cache.unlock(request.keys[request.locked - 1], self._now)
        self.finished += 1
        events.append(Event(self._now, "done", request))
