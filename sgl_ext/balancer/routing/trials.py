"""Requests that may have ended an engine wait here, until each is sent again alone.

    admits --> [wait] --> release --> the admission queue --> sent --> answered, or lost again

`scheduler.suspects` decides. It decides only while some request is suspected.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import xxhash

from scheduler import suspects
from scheduler.suspects import AGAIN, LIMIT, REFUSED, REFUSED_S, Suspects
from sgl_ext.balancer.routing.attempts import Attempt, RoutingRequest
from sgl_ext.balancer.routing.candidates import allowed
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import DECODE, PREFILL, Worker
from sgl_ext.protocols.errors import BalancerError, no_engine

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5


class Suspect(Protocol):
    """A request that may wait here.

    fingerprint: of its tenant and its prompt; "" if it has none. waits_since_s: since when it
    waits; None if it has not waited.
    """

    routing: RoutingRequest
    waits_since_s: float | None

    @property
    def fingerprint(self) -> str: ...
    def release(self, *, on_trial: bool) -> None: ...
    def refuse(self, error: BalancerError) -> None: ...
    def rejected(self, error: BalancerError) -> None: ...


def fingerprint_of(tenant: str, routing: RoutingRequest, body: bytes | bytearray) -> str:
    """What a request has in common with one that its client sends again: the tenant, and the text
    of its prompt, or else its body. "" if it has neither."""
    hashes = routing.chain.hashes
    if not hashes and not body:
        return ""
    found = xxhash.xxh3_128(tenant.encode())
    found.update(b"\xffp%x" % hashes[-1] if hashes else b"\xffb")
    if not hashes:
        found.update(body)
    return found.hexdigest()


def refused() -> BalancerError:
    """A request that ended two engines. A client that repeats it would end others."""
    message = (
        "Two engines ended while they ran this request, so it is not sent to another one. The same "
        f"prompt is refused for {REFUSED_S:g} s."
    )
    return BalancerError(HTTPStatus.BAD_REQUEST, message, code="request_ends_engines")


@dataclass(eq=False)
class Trials:
    """The requests of one balancer process that wait for a trial.

    timeout_s: how long a request may wait.
    _several_s: when there were last several engines, in whatever state.
    """

    router: Router
    timeout_s: Callable[[], float]
    _waiting: dict[Suspect, None] = field(default_factory=dict, init=False)
    _is_sweeping: bool = field(default=False, init=False)
    _several_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._suspects: Suspects = self.router.suspects
        self._suspects.judged = self._judged
        metrics = self.router.metrics
        metrics.tables.add("suspects", self._suspects.__len__, lambda: LIMIT)
        metrics.requests_on_trial.set_function(self._waiting.__len__)
        self.router.workers.on_leave.insert(0, self._ended)
        self.router.workers.on_found.append(self._lives)
        self.router.on_capacity.append(self._go_on)

    def _judged(self, result: str) -> None:
        self.router.metrics.suspect_requests.counts[(result,)] += 1
        if result == "convicted":
            log.error("a request ended two engines; its prompt is refused for %g s", REFUSED_S)

    def admits(self, request: Suspect) -> bool:
        """Whether a request may be placed now. Otherwise it is refused, or waits here."""
        if self._suspects.is_idle:
            return True
        now_s = self.router.clock()
        standing = self._suspects.standing(request.fingerprint, now_s)
        if standing is AGAIN:
            return True
        if standing is REFUSED:
            self._refuse(request)
        else:
            self._wait(request, now_s)
        return False

    def refuses(self, request: Suspect) -> bool:
        """Whether a request is not sent again, as it was lost on trial."""
        return self._suspects.is_caught(request.fingerprint, self.router.clock())

    def _wait(self, request: Suspect, now_s: float) -> None:
        if request.waits_since_s is None:
            request.waits_since_s = now_s
        self._waiting[request] = None

    def _refuse(self, request: Suspect) -> None:
        self.router.metrics.suspect_requests.counts["refused",] += 1
        request.refuse(refused())

    def remove(self, request: Suspect) -> None:
        """A request waits no longer, and is not placed; does nothing if it does not wait."""
        self._waiting.pop(request, None)
        if not self._suspects.is_idle:
            self._suspects.gives_up(request.fingerprint)

    # What happens to those that were placed.

    def may_send(self, request: Suspect, attempt: Attempt) -> bool:
        """Whether a request whose trial has begun may still be sent. Otherwise it waits again: an
        engine may have ended while it was in the admission queue."""
        now_s, since_s = self.router.clock(), request.waits_since_s
        waited_s = 0.0 if since_s is None else now_s - since_s
        self._suspects.gives_up(request.fingerprint)
        if self._may_begin(request, waited_s):
            self._suspects.begin(request.fingerprint)
            return True
        self._wait(request, now_s)
        return False

    def sent(self, request: Suspect, attempt: Attempt) -> None:
        """A request on trial was sent."""
        request.waits_since_s = None
        self._suspects.sent(request.fingerprint, attempt.answerer.id, self.router.clock())

    def lost(self, request: Suspect, worker: Worker, sent_s: float) -> None:
        """A request was lost at a worker that ended, or that hangs."""
        name, now_s = request.fingerprint, self.router.clock()
        if name and not _is_stopped(worker):
            self._suspects.lost(name, worker.id, sent_s, worker.stopped_s(now_s), now_s)

    def left(self, request: Suspect, worker: Worker, sent_s: float) -> None:
        """The client of a request left before the answer was complete."""
        if name := request.fingerprint:
            self._suspects.left(name, worker.id, sent_s)

    def answered(self, request: Suspect) -> None:
        """A request was answered in full."""
        if not self._suspects.is_idle:
            self._suspects.answered(request.fingerprint)

    def _ended(self, worker: Worker) -> None:
        if not _is_stopped(worker):
            now_s = self.router.clock()
            self._suspects.ended(worker.id, worker.stopped_s(now_s), now_s)

    def _lives(self, worker: Worker, probed_s: float) -> None:
        if not self._suspects.is_idle:
            self._suspects.lives(worker.id, probed_s)
            self._go_on()

    # Those that wait.

    def sweep(self) -> None:
        """Clears the suspect whose trial has lasted for long enough, and lets the next one begin.
        Call it periodically."""
        now_s = self.router.clock()
        if _left_of(self.router.workers.all):
            self._several_s = now_s
        self._suspects.pass_time(now_s, self._heard_s)
        self._go_on()

    def _heard_s(self, name: str) -> float | None:
        worker = self.router.workers.find(name)
        return worker.last_heard_s if worker is not None and worker.sends_events else None

    def _go_on(self) -> None:
        if self._is_sweeping or not self._waiting:
            return
        self._is_sweeping = True
        try:
            now_s = self.router.clock()
            for request in tuple(self._waiting):
                if request in self._waiting:
                    self._try(request, now_s)
        finally:
            self._is_sweeping = False

    def _try(self, request: Suspect, now_s: float) -> None:
        standing = self._suspects.standing(request.fingerprint, now_s)
        since_s = request.waits_since_s
        waited_s = 0.0 if since_s is None else now_s - since_s
        if standing is REFUSED:
            del self._waiting[request]
            self._refuse(request)
        elif standing is AGAIN:
            del self._waiting[request]
            request.waits_since_s = None
            request.release(on_trial=False)
        elif not self.router.may_wait(request.routing.only):
            del self._waiting[request]
            request.rejected(no_engine())
        elif waited_s >= self.timeout_s():
            del self._waiting[request]
            message = "An engine ended while it ran this request, and no other one could try it."
            error = BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)
            request.rejected(error)
        elif self._may_begin(request, waited_s):
            del self._waiting[request]
            self._suspects.begin(request.fingerprint)
            request.release(on_trial=True)

    def _may_begin(self, request: Suspect, waited_s: float) -> bool:
        others = self._others(request.routing)
        return self._suspects.may_begin(request.fingerprint, waited_s, others)

    def _others(self, routing: RoutingRequest) -> int:
        """How many engines would be left to answer requests if one ended, whichever that is. 1 if
        there have been no others for long: to wait for them would be in vain."""
        now_s, workers = self.router.clock(), self.router.workers.all
        if now_s - self._several_s >= suspects.LAST_WAIT_S:
            return 1
        able = [w for w in allowed(workers, routing.only) if w.is_available]
        return _left_of(w for w in able if not self._suspects.has_ended(w.id, now_s))


def _left_of(workers: Iterable[Worker]) -> int:
    """How many of these engines, or of their pairs, are left if one ends, with all its ranks."""
    roles = Counter({worker.url: worker.role for worker in workers}.values())
    return max(roles[""] + min(roles[PREFILL], roles[DECODE]) - 1, 0)


def _is_stopped(worker: Worker) -> bool:
    """Whether it was stopped from outside: no request does that."""
    return worker.is_hung and worker.hung_s is None
