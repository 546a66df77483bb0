"""A simulated engine: SGLang's scheduling and cache by the clock it is given, no model.

An iteration is a prefill batch if anyone waits, else decode. A batch takes the
request whose prompt is half done first, then the queue in order, up to
`chunk_tokens` uncached tokens, free slots and memory, and lasts `prefill_base_s`
and a share a token. A request looks into the cache when it joins a batch, and what
a batch computed is held when it ends: two requests of one batch compute a shared
beginning twice. Decoding pauses while a batch runs; a step takes `decode_base_s`
and a share a running request. Attention's growth with the context is left out.

With `host_tokens` everything that is computed is copied to host memory, too (HiCache's
`write_through`), and a request loads from there what the device has lost. With `pin_ttl_s` the
prompt of each request is pinned as our engines pin it (`radix.pins`): within a budget, and never at
the cost of a live request.

    waiting --batch--> prefilling --last chunk--> running --last token--> done
                          ^    |                  "first"                "done"
                          +----+ next chunk
"""

from __future__ import annotations

import heapq
import math
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bench.sim.cache import BlockCache
from bench.sim.prompts import BLOCK_TOKENS, BYTES_PER_TOKEN
from bench.sim.segments import Load, SegmentFeed
from radix.pins import Pin, Pins
from scheduler.order import Waiting, in_order, window_of
from sgl_ext.reading.segments import Chain


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Times in seconds, sizes in tokens. aging_s: above 0, requests wait in the order of our
    engines, with this setting; else the first comes first. pin_share: of the memory, for pins."""

    capacity_tokens: int = 1_500_000
    max_running: int = 64
    prefill_tokens_per_s: float = 40_000.0
    prefill_base_s: float = 0.005
    chunk_tokens: int = 8192
    decode_base_s: float = 0.006
    decode_per_request_s: float = 0.000_1
    aging_s: float = 0.0
    host_tokens: int = 0
    load_tokens_per_s: float = 400_000.0
    pin_ttl_s: float = 0.0
    pin_share: float = 1 / 3
    block_tokens: int = BLOCK_TOKENS


@dataclass(eq=False, slots=True)
class Request:
    """One generation. `keys` are the blocks of prompt and answer together, or more."""

    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    chain: Chain = field(default_factory=Chain)
    block_tokens: int = BLOCK_TOKENS
    cached_tokens: int = 0
    computed: int = 0  # tokens of the prompt that are in memory
    reserved: int = 0  # blocks set aside for what is not held yet
    locked: int = 0  # how many of `keys` are locked
    loaded: int = 0  # blocks that come from the host
    expected: int = 0  # uncached tokens as seen on arrival, the engine's idea of what is pending
    arrived_s: float = 0.0

    @property
    def prompt_blocks(self) -> int:
        """Full blocks that may come from the cache: the last token is always computed."""
        return (self.prompt_tokens - 1) // self.block_tokens

    @property
    def all_blocks(self) -> int:
        return (self.prompt_tokens + self.output_tokens - 1) // self.block_tokens


class Event(NamedTuple):
    """A request's first token, or its end."""

    at: float
    kind: Literal["first", "done", "refused"]
    request: Request


class Engine:
    """`submit`, then `advance` to `next_at()` and beyond; times never go back."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.cache = BlockCache(self.config.capacity_tokens // self.config.block_tokens)
        self.host = BlockCache(self.config.host_tokens // self.config.block_tokens)
        self.segments = SegmentFeed(self.config.block_tokens)
        budget = int(self.cache.capacity * self.config.pin_share)
        self.pins = Pins(budget_tokens=budget)
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
            used * self.config.block_tokens,
            self.config.capacity_tokens,
            self.prefill_tokens,
            self.prefill_s,
            self.config.host_tokens,
        )

    def cached_tokens(self, request: Request) -> int:
        """How much of a prompt would come from the cache if it were computed now."""
        return self.cache.match(request.keys, request.prompt_blocks) * self.config.block_tokens

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
        self._unlock(self.pins.clear())
        self.segments.removed([*self.cache.clear(), *self.host.clear()])

    def close(self, keys: Sequence[int]) -> None:
        """A session has ended: forgets what it alone has used, as far as nothing protects it."""
        self._lost(self.cache.drop(keys))

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
            loaded = sum(request.loaded for request, _ in self._batch)
            lasts += loaded * self.config.block_tokens / config.load_tokens_per_s
            for request, _ in self._batch:
                request.loaded = 0
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
        self._unlock(self.pins.expire(self._now))
        matched = self.cache.match(request.keys, request.prompt_blocks)
        if matched:
            self.cache.lock(request.keys[matched - 1])
        # One block more: the text beyond the last full one needs memory, too.
        needed = request.all_blocks - matched + 1
        enough, evicted = self._reserve(needed)
        if not enough:
            if matched:
                self.cache.unlock(request.keys[matched - 1], self._now)
            return False
        self._lost(evicted)
        if len(self.pins):
            self.pins.hit(0, _key(request.keys, matched), self._now, matched)
        on_host = self.host.match(request.keys, request.prompt_blocks) if self.host.capacity else 0
        request.loaded = max(0, on_host - matched)
        request.locked, request.reserved = matched, needed
        request.computed = request.cached_tokens = (
            matched + request.loaded
        ) * self.config.block_tokens
        self._pending += request.prompt_tokens - request.computed - request.expected
        return True

    def _reserve(self, blocks: int) -> tuple[bool, list[int]]:
        """Memory for a request. Pins give way to it, as few as needed. If it does not fit without
        any of them, all stay."""
        done = self.cache.reserve(blocks)
        given_up: list[Pin] = []
        for pin in () if done[0] else self.pins.in_turns():
            self._unlock([pin])
            given_up.append(pin)
            done = self.cache.reserve(blocks)
            if done[0]:
                break
        for pin in given_up:
            if done[0]:
                self.pins.release(pin)
            else:
                self.cache.lock(_last_key(pin))
        return done

    def _pin(self, request: Request) -> None:
        """Pins a prompt that was computed at its marks: after the instructions, and at its end."""
        if not self.config.pin_ttl_s:
            return
        chain = request.chain
        marks = {request.prompt_blocks}
        if chain.head_segments:
            head_bytes = chain.ends[chain.head_segments - 1]
            marks.add(head_bytes // (BYTES_PER_TOKEN * self.config.block_tokens))
        for blocks in marks - {0}:
            key = _key(request.keys, blocks)
            grant = self.pins.grant(0, key, self.config.pin_ttl_s, self._now, label=key[-8:])
            self._unlock(grant.released)
            if grant.is_new:
                self.cache.lock(request.keys[blocks - 1])

    def _unlock(self, pins: Sequence[Pin]) -> None:
        for pin in pins:
            self.cache.unlock(_last_key(pin), pin.used_s)

    def _end_batch(self, events: list[Event]) -> None:
        batch, self._batch, self._batch_ends = self._batch, [], math.inf
        for request, share in batch:
            request.computed += share
            self._pending -= share
            whole = request.computed == request.prompt_tokens
            done = request.prompt_blocks if whole else request.computed // self.config.block_tokens
            self._hold(request, done)
            self.segments.stored(request.chain, request.keys, done)
            if not whole:
                self._half_done = request
                continue
            self._pin(request)
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
        if self.host.capacity:
            self._copy(request.keys, blocks)
        self.cache.lock(request.keys[blocks - 1])
        if request.locked:
            self.cache.unlock(request.keys[request.locked - 1], self._now)
        request.locked = blocks

    def _copy(self, keys: Sequence[int], blocks: int) -> None:
        """Copies the first blocks of a request to the host, which forgets others for them."""
        held = self.host.match(keys, blocks)
        if held:
            self.host.lock(keys[held - 1])
        enough, evicted = self.host.reserve(blocks - held)
        if enough:
            self.segments.removed(key for key in evicted if key not in self.cache)
            self.host.release(blocks - held)
            self.host.insert(keys, held, blocks, self._now)
        if held:
            self.host.unlock(keys[held - 1], self._now)

    def _lost(self, keys: Sequence[int]) -> None:
        """Blocks left the device. What the host has of them is still held."""
        self.segments.removed(key for key in keys if key not in self.host)

    def _finish(self, request: Request, events: list[Event]) -> None:
        self._hold(request, request.all_blocks)
        self.cache.release(request.reserved)
        if request.locked:
            self.cache.unlock(request.keys[request.locked - 1], self._now)
        self.finished += 1
        events.append(Event(self._now, "done", request))


def _key(keys: Sequence[int], blocks: int) -> bytes:
    """The first blocks of a request as `radix.pins` takes a prefix: a block is a token there."""
    return array("Q", keys[:blocks]).tobytes()


def _last_key(pin: Pin) -> int:
    """The block that a pin locks."""
    return int.from_bytes(pin.label, sys.byteorder)
