"""The scheduler's side of prefix events: once an iteration, what changed goes to the HTTP process.

Nothing here waits. A line that finds no room is dropped, and as soon as there is
room everything held is sent again.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

import orjson
import zmq

from sgl_ext.engine.core import ranks
from sgl_ext.engine.core.channels import events_address
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.event_lines import lines_of, pin_row, stored_lines
from sgl_ext.engine.core.slices import is_slice

_SWEEP_STEPS = 2000  # at most about 1 ms
_LOAD_INTERVAL_S = 0.1
# A prefill of no more takes about as long as one step of decoding.
_SHORT_TOKENS = 512
_LINES_WAITING = 1000
_logger = logging.getLogger(__name__)


def tick(plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`: publishes what changed since the last time."""
    publisher = _publisher(scheduler)
    if publisher is not None:
        publisher.publish(plan, time.monotonic())


@cache
def _publisher(scheduler: Any) -> Publisher | None:

    from sgl_ext.engine.scheduler.radix_cache import HeldCache

    if not ranks.is_entry_rank():
        _logger.info("sgl-ext: not the first rank of an engine with one tree: no prefix events")
        return None
    cache = scheduler.tree_cache
    if not isinstance(cache, HeldCache):
        _logger.warning(
            f"sgl-ext: {type(cache).__name__} is not ours: load is published, prefixes are not"
        )
    return Publisher(scheduler, cache if isinstance(cache, HeldCache) else None, Channel())


class Channel:
    """Lines to the HTTP process of the same engine. Never waits."""

    def __init__(self) -> None:
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.set_hwm(_LINES_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(events_address())

    def has_room(self) -> bool:
        """Whether a line could be sent now."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def send(self, line: dict[str, Any]) -> bool:
        """Whether there was room for it."""
        try:
            self._socket.send(orjson.dumps(line), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Publisher:
    """Publishes one scheduler's segments and load."""

    def __init__(self, scheduler: Any, cache: Any, channel: Any) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._channel = channel
        self._behind = False
        self._has_waited = False
        self._load: dict[str, int] = {}
        self._load_due = 0.0
        self._counted = {"event_sweeps_deferred": 0, "events_forgotten": 0}

    def publish(self, plan: Any, now: float) -> None:
        """One iteration, at `now` in seconds. `plan` is what the scheduler runs next."""
        # A first token that comes soon does not wait for this, but the next iteration brings it.
        self._has_waited = not self._has_waited and _is_short(plan)
        if self._has_waited:
            return
        idle = plan.batch_to_run is None
        lines: list[dict[str, Any]] = []
        if self._cache is not None:
            held = self._cache.held
            # Nobody waits for an idle scheduler, and it may sleep for a second from here.
            self._cache.sweep(1 << 60 if idle else _SWEEP_STEPS)
            if held.changed and not self._behind:
                lines += lines_of(held.take())
            if self._cache.pins.changed and not self._behind:
                lines = _joined(lines, pin_changes(self._cache.pins))
            self._count("event_sweeps_deferred", held.deferred)
            self._count("events_forgotten", held.forgotten)
        if now >= self._load_due or idle:
            pinned = self._cache.pins.tokens if self._cache is not None else 0
            load = load_of(self._scheduler, plan, pinned)
            if load != self._load:
                self._load_due = now + _LOAD_INTERVAL_S
                self._load = load
                lines = _joined(lines, {"load": load})
        if self._behind:
            if not self._channel.has_room():
                return
            lines = self._everything()
        for line in lines:
            if not self._channel.send(line):
                counter("event_lines_dropped").inc()
                self._behind = True
                return
        self._behind = False

    def _everything(self) -> list[dict[str, Any]]:
        if self._cache is None:
            return [{"cleared": True}, {"load": self._load}]
        held, keeper = self._cache.held, self._cache.pins
        held.take()
        keeper.take()
        rows = [pin_row(pin, keeper.now_s) for pin in keeper.pins]
        pinned = [{"pinned": rows}] if rows else []
        return [{"cleared": True}, *stored_lines(held.snapshot()), *pinned, {"load": self._load}]

    def _count(self, name: str, total: int) -> None:
        if total != self._counted[name]:
            counter(name).inc(total - self._counted[name])
            self._counted[name] = total


def _is_short(plan: Any) -> bool:
    """Whether prompts are computed next, and little of them is new."""
    batch = plan.batch_to_run
    if batch is None or batch is plan.running_batch:
        return False
    return bool((batch.extend_num_tokens or 0) <= _SHORT_TOKENS)


def _joined(lines: list[dict[str, Any]], more: dict[str, Any]) -> list[dict[str, Any]]:
    """With more in the last line, as each costs both ends time."""
    return [*lines[:-1], lines[-1] | more] if lines else [more]


def pin_changes(keeper: Any) -> dict[str, Any]:
    """What became of pins since this was last asked."""
    changes = keeper.take()
    line: dict[str, Any] = {}
    if changes.gone:
        line["unpinned"] = sorted(changes.gone)
    if changes.seen:
        line["pinned"] = [pin_row(pin, keeper.now_s) for pin in changes.seen.values()]
    return line


def load_of(scheduler: Any, plan: Any, pinned_tokens: int) -> dict[str, int]:
    """A scheduler's load as it starts an iteration: requests, and tokens of prompts and memory.

    What is prefilled ahead is none: it is dropped when there is something to do.
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
    }
