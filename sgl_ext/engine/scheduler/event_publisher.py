"""Prefix events and load: after each batch's output, the entry rank sends what changed to the HTTP
process.

Nothing here waits. A line is dropped if the socket is full. As soon as the socket takes lines
again, everything that is resident is sent once more. What one call does is bounded, and the next
one goes on: a request that arrives meanwhile waits for it.
"""

from typing import Protocol, cast

import zmq

from radix.residency import Residency, Tier
from scheduler.load_cost import PRIOR
from sgl_ext.engine.core.counters import counter, gauge
from sgl_ext.engine.core.folder import address
from sgl_ext.engine.core.hints import is_slice
from sgl_ext.engine.scheduler.pins import PinKeeper
from sgl_ext.engine.sglang_types import CacheController, NextBatchPlan, ScheduleBatch, Scheduler
from sgl_ext.engine.tiers.host_tier import Loads
from sgl_ext.engine.tiers.shared_pages import shared_pages_of
from sgl_ext.wire.events import LOAD, PREFIXES, EngineLoad, Line, encode, lines_of, pin_row

_SWEEP_STEPS = 2000  # at most about 1 ms
_SEGMENTS = 1000  # at most about 1 ms
# How much more an idle scheduler does in a call. Then it may sleep for a second.
_IDLE_FACTOR = 10
_LOAD_INTERVAL_S = 0.1
# While requests decode, the used tokens change with every token, and no decision reads them. A line
# costs every process on its way about a millisecond.
_USE_INTERVAL_S = 1.0
_LINES_WAITING = 1000


class PublishedCache(Protocol):
    """What is published of the extension's radix cache."""

    pins: PinKeeper
    residency: Residency | None
    loads: Loads
    host_tokens: int
    cache_controller: CacheController | None

    def sweep(self, steps: int) -> None: ...


class EventChannel:
    """Sends lines to the HTTP process of the same engine, and never waits."""

    def __init__(self, rank: int = 0) -> None:
        """rank: the number of this scheduler among those of its engine."""
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.set_hwm(_LINES_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address(f"events-{rank}"))

    def send(self, line: Line) -> bool:
        """Whether the line was sent."""
        try:
            self._socket.send(encode(line), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class EventPublisher:
    """Publishes one scheduler's segments, pins and load.

    cache: None publishes the load alone. stages: of the engine's pipeline.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PublishedCache | None,
        channel: EventChannel,
        stages: int = 1,
    ) -> None:
        self._is_pipeline = stages > 1
        self._scheduler = scheduler
        self._cache = cache
        self._channel = channel
        self._has_lost = False
        self._load: EngineLoad = {}
        self._shares: dict[str, float] = {}
        self._tiers_off: list[str] = []
        self._load_due_s = self._use_due_s = 0.0
        self._decoding: tuple[int, int] | None = None
        self._counted = {"event_sweeps_deferred": 0, "event_branches_dropped": 0}
        self.plan: NextBatchPlan | None = None

    def publish(
        self, now_s: float, computed: ScheduleBatch | None = None, load_share: float = PRIOR
    ) -> None:
        """Publishes what changed since the last call. Call it after a batch's output is sent, and
        when the scheduler is idle. load_share: what a token costs that the host loads.

        computed: the batch whose output was sent. `plan` is what the scheduler has decided last: it
        runs the plan's batch, unless that is the computed one.
        """
        if self.plan is None:
            return
        if self._has_lost:
            if not self._channel.send({"cleared": True}):
                return
            self._renew()
        is_idle = self.plan.batch_to_run is None
        lines = self._changes(_IDLE_FACTOR if is_idle else 1)
        decoding = self._decoding_now(self.plan)
        # While the same requests decode and as many wait, only used and pinned tokens change, for
        # which a count each second is enough: counting takes time from each token.
        may_differ = decoding is None or decoding != self._decoding
        if is_idle or now_s >= self._use_due_s or (may_differ and now_s >= self._load_due_s):
            self._decoding = decoding
            pinned = self._cache.pins.tokens if self._cache is not None else 0
            load = load_of(self._scheduler, self.plan, pinned, computed)
            if self._cache is not None:
                keeper = self._cache.pins
                load["pin_budget_tokens"] = keeper.pins.device.budget_tokens
                load["pins_declined"] = dict(keeper.declined)
            lines = self._with_loads(lines, load, load_share)
            if self._is_pipeline:  # a plan is of one micro-batch, and several are in the pipeline
                load["running"] = _in_flight(self._scheduler)
            if self._is_due(load, now_s, is_idle):
                self._load_due_s = now_s + _LOAD_INTERVAL_S
                self._use_due_s = now_s + _USE_INTERVAL_S
                lines = _with(lines, {"load": load})
                if not self._load:  # a reader must know before the first segment
                    lines[0] = self._publishes() | lines[0]
                self._load = load
        for line in lines:
            if not self._channel.send(line):
                counter("event_lines_dropped").inc()
                self._has_lost = True
                return
        self._has_lost = False

    def _decoding_now(self, plan: NextBatchPlan) -> tuple[int, int] | None:
        """How many requests decode and how many wait. None if the scheduler computes prompts, too,
        or has several micro-batches."""
        if plan.batch_to_run is not plan.running_batch or self._is_pipeline:
            return None
        return len(plan.running_batch.reqs), len(self._scheduler.waiting_queue)

    def _is_due(self, load: EngineLoad, now_s: float, is_idle: bool) -> bool:
        """Whether a load is sent now: it differs from the last one in more than the used tokens, or
        the used tokens were last sent long ago."""
        if now_s >= self._use_due_s or is_idle:
            return load != self._load
        return load != self._load | {"used_tokens": load["used_tokens"]}

    def _with_loads(self, lines: list[Line], load: EngineLoad, load_share: float) -> list[Line]:
        """Adds to the lines what a token costs that a slower tier has, if that has changed; and to
        the load the host's memory, and what waiting requests will load, which SGLang's estimate
        leaves out."""
        if self._cache is None or self._cache.cache_controller is None:
            return lines
        shares = {"load_share": load_share}
        if (tier := shared_pages_of(self._cache)) is not None:
            cost = self._cache.loads.cost
            while tier.reads:
                cost.read(*tier.reads.popleft())
            shares["shared_share"] = cost.shared_share
            off = [f"shared tier ({tier.switch.why})"] if tier.switch.why else []
            if off != self._tiers_off:
                self._tiers_off = off
                lines = _with(lines, {"tiers_off": off})
        on_host = sum(req.host_hit_length for req in self._scheduler.waiting_queue)
        load["pending_tokens"] += int(shares["load_share"] * on_host)
        load["host_capacity_tokens"] = self._cache.host_tokens
        if shares == self._shares:
            return lines
        self._shares = shares
        for name, share in shares.items():
            gauge(name).set(share)
        return _with(lines, cast(Line, shares))

    def stored(self) -> None:
        """All that the engine holds is in the tier that engines share, if it has room."""
        self._channel.send({"stored_all": True})

    def _publishes(self) -> Line:
        """What is published, and for the HTTP process where the shared tier has its pages."""
        cache = self._cache
        if cache is None or cache.residency is None:
            return {"publishes": [LOAD]}
        tiers = [] if cache.residency.host is None else [Tier.HOST.value]
        said: Line = {"publishes": [PREFIXES, *tiers, LOAD]}
        tier = shared_pages_of(cache)
        if tier is not None:
            said |= {"machine": tier.machine, "shared_pages": str(tier.path)}
        return said

    def _renew(self) -> None:
        """Makes the next calls send everything once more, to a receiver that was cleared."""
        self._load, self._shares, self._decoding, self._tiers_off = {}, {}, None, []
        self._load_due_s = self._use_due_s = 0.0
        if self._cache is not None and self._cache.residency is not None:
            self._cache.residency.renew()
            pins = self._cache.pins
            pins.changed = {pin.prefix: pin for pin in pins.pins}

    def _changes(self, factor: int) -> list[Line]:
        cache = self._cache
        if cache is None or (residency := cache.residency) is None:
            return []
        cache.sweep(factor * _SWEEP_STEPS)
        lines: list[Line] = []
        if residency.changed:
            lines += lines_of(residency.take(factor * _SEGMENTS))
        if cache.pins.changed:
            lines = _with(lines, pin_changes(cache.pins))
        self._count("event_sweeps_deferred", residency.deferred)
        self._count("event_branches_dropped", residency.forgotten)
        return lines

    def _count(self, name: str, total: int) -> None:
        if total != self._counted[name]:
            counter(name).inc(total - self._counted[name])
            self._counted[name] = total


def _with(lines: list[Line], fields: Line) -> list[Line]:
    """The lines with `fields` added to the last one, as each line costs both ends time."""
    return [*lines[:-1], lines[-1] | fields] if lines else [fields]


def pin_changes(pins: PinKeeper) -> Line:
    """The fields of a line for the changes of pins since the last call."""
    changes: Line = {}
    if ended := sorted(prefix for prefix, pin in pins.changed.items() if pin is None):
        changes["unpinned"] = ended
    if kept := [pin_row(pin, pins.now_s) for pin in pins.changed.values() if pin is not None]:
        changes["pinned"] = kept
    pins.changed.clear()
    return changes


def load_of(
    scheduler: Scheduler,
    plan: NextBatchPlan,
    pinned_tokens: int,
    computed: ScheduleBatch | None = None,
) -> EngineLoad:
    """A scheduler's load: requests, and tokens of prompts and memory. computed: the batch whose
    output was just sent.

    Prefill slices are no load: they are dropped when a request comes.
    """
    inquirer, batch, chunked = scheduler.load_inquirer, plan.batch_to_run, scheduler.chunked_req
    running = _requests(plan.running_batch)
    pending = inquirer.get_num_waiting_uncached_tokens()
    is_ahead = batch is not None and any(is_slice(req) for req in batch.reqs)
    if batch is not None and batch is not plan.running_batch and not is_ahead:
        running += _requests(batch)
        if batch is not computed:
            pending += batch.extend_num_tokens or 0
        if chunked is not None:  # its chunk is counted as if it waited
            pending -= max(0, (chunked.extend_end or 0) - chunked.prefix_len)
    used, _ = inquirer.pool_stats_observer.get_pool_stats().get_kv_token_stats()
    return {
        "running": running,
        "queued": len(scheduler.waiting_queue),
        "pending_tokens": pending,
        "used_tokens": used,
        "pinned_tokens": pinned_tokens,
        "capacity_tokens": inquirer.max_total_num_tokens,
        "max_running": scheduler.max_running_requests,
        "context_tokens": scheduler.max_req_len,
        "prefill_tokens": scheduler.total_prefill_uncached_tokens,
        "prefill_ms": scheduler.total_prefill_busy_us // 1000,
    }


def _in_flight(scheduler: Scheduler) -> int:
    """The requests of all micro-batches."""
    every = scheduler.collect_inflight_reqs()
    return sum(not (req.finished() or is_slice(req)) for req in every)


def _requests(batch: ScheduleBatch) -> int:
    """How many of a batch's requests go on. One that has ended stays in it for an iteration."""
    return sum(not (is_slice(req) or req.finished()) for req in batch.reqs)
