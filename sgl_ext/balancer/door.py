"""The door: requests wait before it while all workers are full, and pass it in order.

The order is the engines' own (`scheduler.order`): priority that rises with waiting, tenants in
turns, the cheapest first. If too many wait, the last of that order is turned away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from scheduler.order import Served, Waiting, in_order
from sgl_ext.balancer.errors import BalancerError, no_engine
from sgl_ext.balancer.metrics import Metrics
from sgl_ext.balancer.router import Asked, Flight, Router
from sgl_ext.balancer.workers import Worker

_RETRY_AFTER_S = 5


class Caller(Protocol):
    """Whoever wants a request placed: told once, at once or later."""

    asked: Asked
    tried: set[Worker]

    def placed(self, flight: Flight) -> None: ...
    def refused(self, error: BalancerError) -> None: ...


class Door:
    """At most `limit` callers wait, none longer than `timeout_s`."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        limit: int,
        timeout_s: float,
        aging_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._limit = limit
        self._timeout_s = timeout_s
        self._aging_s = aging_s
        self._served = Served()
        self._clock = clock
        self._waiting: dict[Caller, float] = {}
        router.on_room(self.open)

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiting)

    def place(self, caller: Caller) -> bool:
        """Places the caller's request now if nobody is ahead and a worker has room.

        False if the caller has to wait.
        """
        flight = None if self._waiting else self._router.place(caller.asked, caller.tried)
        if flight is not None:
            caller.placed(flight)
            return True
        if not self._router.any_open():
            caller.refused(no_engine())
            return True
        self._waiting[caller] = self._clock()
        if len(self._waiting) > self._limit:
            last = self._in_order()[-1]
            del self._waiting[last]
            self._turn_away(last, f"{len(self._waiting)} requests wait already.")
        return caller not in self._waiting

    def leave(self, caller: Caller) -> None:
        """The caller does not wait any more; nothing happens if it did not."""
        self._waiting.pop(caller, None)

    def open(self) -> None:
        """There may be room: lets in whom there is room for."""
        for caller in self._in_order() if self._waiting else ():
            if caller not in self._waiting:  # left while others were let in
                continue
            flight = self._router.place(caller.asked, caller.tried)
            if flight is None:
                break
            del self._waiting[caller]
            self._served.add(caller.asked.tenant, _cost(caller.asked), self._clock())
            caller.placed(flight)

    def sweep(self) -> None:
        """Refuses those who have waited too long, or all if no worker is left. Run it often."""
        self.open()
        now_s = self._clock()
        nobody = not self._router.any_open()
        for caller, since_s in list(self._waiting.items()):
            if nobody:
                del self._waiting[caller]
                caller.refused(no_engine())
            elif since_s + self._timeout_s <= now_s:
                del self._waiting[caller]
                self._turn_away(caller, f"None had room for {self._timeout_s:g} s.")

    def _in_order(self) -> list[Caller]:
        callers = list(self._waiting)
        now_s = self._clock()
        waiting = [
            Waiting(caller.asked.priority, since_s, _cost(caller.asked), caller.asked.tenant)
            for caller, since_s in self._waiting.items()
        ]
        order = in_order(waiting, now_s, self._aging_s, self._served.at(now_s))
        return [callers[at] for at in order]

    def _turn_away(self, caller: Caller, why: str) -> None:
        self._metrics.turned_away.inc()
        message = f"All engines are busy. {why}"
        caller.refused(BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S))


def _cost(asked: Asked) -> int:
    return asked.prompt_tokens + asked.output_tokens
