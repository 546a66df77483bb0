"""Prefix events and load: once an iteration, the entry rank sends what changed to the HTTP process.

Nothing here waits. A line is dropped if the socket is full. As soon as the socket takes lines
again, a snapshot of everything that is resident is sent.
"""

from typing import TYPE_CHECKING, Any

import orjson
import zmq

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.event_lines import lines_of, pin_row, stored_lines
from sgl_ext.engine.core.folder import address
from sgl_ext.engine.core.slices import is_slice
from sgl_ext.engine.scheduler.pin_keeper import PinKeeper
from sgl_ext.engine.sglang_types import NextBatchPlan, Scheduler

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache

_SWEEP_STEPS = 2000  # at most about 1 ms
_LOAD_INTERVAL_S = 0.1
# A prefill of at most this length takes about as long as one step of decoding.
_SHORT_TOKENS = 512
_LINES_WAITING = 1000


class EventChannel:
    """Sends lines to the HTTP process of the same engine, and never waits."""

    def __init__(self) -> None:
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.set_hwm(_LINES_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address("events"))

    def send(self, line: dict[str, Any]) -> bool:
        """Whether the line was sent."""
        try:
            self._socket.send(orjson.dumps(line), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class EventPublisher:
    """Publishes one scheduler's segments, pins and load. cache: None publishes the load alone."""

    def __init__(
        self, scheduler: Scheduler, cache: "ExtendedRadixCache | None", channel: EventChannel
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._channel = channel
        self._needs_snapshot = False
        has_prefixes = cache is not None and cache.residency is not None
        self._publishes = ["prefixes", "load"] if has_prefixes else ["load"]
        self._has_waited = False
        self._load: dict[str, int] = {}
        self._load_due_s = 0.0
        self._counted = {"event_sweeps_deferred": 0, "event_branches_dropped": 0}

    def publish(self, plan: NextBatchPlan, now_s: float) -> None:
        """Publishes what changed since the last iteration. `plan` is what the scheduler runs next.

        A first token that comes soon does not wait for this: the next iteration publishes.
        """
        self._has_waited = not self._has_waited and _is_short_prefill(plan)
        if self._has_waited:
            return
        is_idle = plan.batch_to_run is None
        lines = self._changes(is_idle)
        if now_s >= self._load_due_s or is_idle:
            pinned = self._cache.pins.tokens if self._cache is not None else 0
            load = load_of(self._scheduler, plan, pinned)
            if load != self._load:
                self._load_due_s = now_s + _LOAD_INTERVAL_S
                said = {} if self._load else {"publishes": self._publishes}
                self._load = load
                lines = _with(lines, {**said, "load": load})
        if self._needs_snapshot:
            if not self._channel.send({"cleared": True}):
                return
            lines = self._snapshot()
        for line in lines:
            if not self._channel.send(line):
                counter("event_lines_dropped").inc()
                self._needs_snapshot = True
                return
        self._needs_snapshot = False

    def _changes(self, is_idle: bool) -> list[dict[str, Any]]:
        cache = self._cache
        if cache is None or (residency := cache.residency) is None:
            return []
        # No request waits for an idle scheduler, which may now sleep for a second.
        cache.sweep(1 << 60 if is_idle else _SWEEP_STEPS)
        lines: list[dict[str, Any]] = []
        if not self._needs_snapshot:
            if residency.changed:
                lines += lines_of(residency.take())
            if cache.pins.changed:
                lines = _with(lines, pin_changes(cache.pins))
        self._count("event_sweeps_deferred", residency.deferred)
        self._count("event_branches_dropped", residency.forgotten)
        return lines

    def _snapshot(self) -> list[dict[str, Any]]:
        """Everything that there is, as lines for a receiver that was cleared."""
        cache = self._cache
        if cache is None or (residency := cache.residency) is None:
            return [{"publishes": self._publishes, "load": self._load}]
        residency.take()
        cache.pins.changed.clear()
        rows = [pin_row(pin, cache.pins.now_s) for pin in cache.pins.pins]
        pinned = [{"pinned": rows}] if rows else []
        stored = stored_lines(residency.snapshot())
        return [*stored, *pinned, {"publishes": self._publishes, "load": self._load}]

    def _count(self, name: str, total: int) -> None:
        if total != self._counted[name]:
            counter(name).inc(total - self._counted[name])
            self._counted[name] = total


def _is_short_prefill(plan: NextBatchPlan) -> bool:
    """Whether prompts are computed next, and few of their tokens are uncached."""
    batch = plan.batch_to_run
    if batch is None or batch is plan.running_batch:
        return False
    return (batch.extend_num_tokens or 0) <= _SHORT_TOKENS


def _with(lines: list[dict[str, Any]], fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines with `fields` added to the last one, as each line costs both ends time."""
    return [*lines[:-1], lines[-1] | fields] if lines else [fields]


def pin_changes(pins: PinKeeper) -> dict[str, Any]:
    """The fields of a line for the changes of pins since the last call."""
    ended = sorted(prefix for prefix, pin in pins.changed.items() if pin is None)
    pinned = [pin_row(pin, pins.now_s) for pin in pins.changed.values() if pin is not None]
    pins.changed.clear()
    return ({"unpinned": ended} if ended else {}) | ({"pinned": pinned} if pinned else {})


def load_of(scheduler: Scheduler, plan: NextBatchPlan, pinned_tokens: int) -> dict[str, int]:
    """A scheduler's load as it starts an iteration: requests, and tokens of prompts and memory.

    Prefill slices are no load: they are dropped when a request comes.
    """
    inquirer, batch, chunked = scheduler.load_inquirer, plan.batch_to_run, scheduler.chunked_req
    running = sum(not is_slice(req) for req in plan.running_batch.reqs)
    pending = inquirer.get_num_waiting_uncached_tokens()
    is_ahead = batch is not None and any(is_slice(req) for req in batch.reqs)
    if batch is not None and batch is not plan.running_batch and not is_ahead:
        running += len(batch.reqs)
        pending += batch.extend_num_tokens or 0
        if chunked is not None:  # its chunk is in both
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
    }
