"""One clock for all ranks of an engine, and orders that all carry out in the same iteration.

The entry rank sends both with the requests it broadcasts: a tick a second while there are
pins or work, and the names of pins that somebody gave up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import zmq

from sgl_ext.engine.core import ranks
from sgl_ext.engine.core.channels import orders_address
from sgl_ext.engine.scheduler import slice_gate

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """What every rank does next: time goes on to `now_s`, pins of these prefixes are given up."""

    now_s: float
    unpin: tuple[str, ...] = ()


def send_orders(aborts: list[Any], scheduler: Any) -> list[Any]:
    """After `Scheduler._poll_timeout_aborts`, which runs on entry ranks: adds what is due."""

    keeper = keeper_of(scheduler)
    if keeper is None:
        return aborts
    unpin = _inbox().take() if ranks.is_entry_rank() else ()
    now_s = time.monotonic()
    due = now_s >= keeper.now_s + TICK_S and (
        len(keeper.pins) or scheduler.waiting_queue or not scheduler.running_batch.is_empty()
    )
    return [*aborts, Order(now_s, unpin)] if due or unpin else aborts


def take_orders(
    original: Callable[[Any, list[Any]], None], scheduler: Any, requests: list[Any]
) -> None:
    """Around `Scheduler.process_input_requests`: carries out orders, and leaves it the rest. What
    is to be prefilled ahead comes last, and does not wait
    (`sgl_ext.engine.scheduler.slice_gate`)."""
    orders = [request for request in requests if isinstance(request, Order)]
    if orders:
        requests = [request for request in requests if not isinstance(request, Order)]
        keeper = keeper_of(scheduler)
        for order in orders:
            keeper.advance(order.now_s)
            keeper.release_named(order.unpin)
    original(scheduler, slice_gate.behind_all(requests))
    slice_gate.gate(scheduler)


def keeper_of(owner: Any) -> Any:
    """The pins of whoever has a `tree_cache`, None if that cache is not ours."""
    return getattr(owner.tree_cache, "pins", None)


class _Inbox:
    """Names of pins that the HTTP process wants given up."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.bind(orders_address())

    def take(self) -> tuple[str, ...]:
        names: list[str] = []
        while self._socket.poll(0):
            names += orjson.loads(self._socket.recv())
        return tuple(names)


@cache
def _inbox() -> _Inbox:
    return _Inbox()
