"""One request that a gateway brings: an exchange whose way to the engine is the gateway.

    begin: prepare -> place, as any exchange -> the gateway sends it to the engine

The gateway learns once where the request goes, so nothing is tried again here after that. It tries
the spare engines that were named, if it is configured to.
"""

import asyncio
from heapq import nsmallest
from http import HTTPStatus
from typing import Protocol

from msgspec import structs

from sgl_ext.balancer.http.downstream import Client
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.upstream import ResponseHead, Upstream
from sgl_ext.balancer.relay.delivery import ENDED
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.relay.preparation import Preparation
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.routing.attempts import Attempt
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.errors import BalancerError, no_engine
from sgl_ext.settings.sources import address_of

_SPARE = 2
"""Engines that a gateway is named besides the one that was picked."""
_UNAUTHORIZED = 401


class Gateway(Client, Upstream, Protocol):
    """The gateway as one request sees it: its client, and its way to the engine.

    shows_answers: whether the answer passes through here.
    """

    shows_answers: bool

    def route(self, destination: str) -> None: ...
    def let_through(self, lines: bytes) -> None: ...


class Pick(Exchange):
    """One request and its response."""

    _is_routed = False
    _may_be_resent = False  # the gateway ends a request whose client has left

    def __init__(
        self,
        services: Services,
        gateway: Gateway,
        request: Request,
        only: frozenset[str] | None,
    ) -> None:
        """only: the addresses that it may go to; None: any."""
        super().__init__(services, gateway, request)
        self._gateway = gateway
        self._only = None if only is None else frozenset(f"http://{each}" for each in only)

    def _prepared(self, preparation: Preparation) -> None:
        if not self._gateway.shows_answers and _needs_answer(preparation):
            message = (
                "The gateway does not show answers to its endpoint picker "
                "(response_body_mode: NONE), which this request needs."
            )
            raise BalancerError(HTTPStatus.NOT_IMPLEMENTED, message)
        if self._only is not None:
            routing = structs.replace(preparation.routing, only=self._only)
            preparation = structs.replace(preparation, routing=routing)
        super()._prepared(preparation)

    def _lease(self) -> asyncio.Task[None] | None:
        attempt = self._attempt
        if attempt is None:  # the control plane, in this process
            return super()._lease()
        destination = ",".join(_addresses(self._services, attempt))
        if destination:
            self._is_routed = True
            self._gateway.route(destination)
            self.connected(self._gateway)
        else:
            message = f"A gateway reaches engines by address, and {attempt.answerer.id} has a name."
            self._release(by_worker=False)
            self._answer_error(BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message))
        return None

    # What the gateway reports.

    def served_by(self, address: str) -> None:
        """The engine at this address answers. If it is another one, the first one failed."""
        attempt, url = self._attempt, f"http://{address}"
        if attempt is None or url == attempt.answerer.url:
            return
        rank, workers = attempt.answerer.rank, self._services.workers.all
        worker = next((w for w in workers if (w.url, w.rank) == (url, rank)), None)
        if worker is None:
            return
        metrics = self._services.metrics
        metrics.retries.inc()
        metrics.placements.counts[("moved",)] += 1
        attempt = self._services.router.take_over(attempt, worker)
        attempt.abandon = self.abandon
        self._attempt = self._last_attempt = attempt
        self._attempts += 1
        self.tried.add(worker)

    def passed(self, head: ResponseHead) -> None:
        """The gateway sends an answer on without showing its body. head: of that answer."""
        self.response_head(head)
        if head.status == _UNAUTHORIZED and self._is_refused(head):
            return
        self._first_byte()
        self._request.body = b""
        if head.streams and self._attempt is not None:
            self._services.router.attempts.prefill_done(self._attempt)
        self._gateway.let_through(self._response.lines)

    def passed_to_end(self) -> None:
        """The gateway does not say whether the answer was complete; it counts as if."""
        if self._stage is not ENDED:
            self._complete()

    # What cannot be tried again.

    def _retry(self, reason: str, *, answered: bool = False, by_worker: bool = True) -> None:
        if not self._is_routed:
            super()._retry(reason, answered=answered, by_worker=by_worker)
            return
        self._warn("attempt failed", reason)
        self._release(by_worker=by_worker, answered=answered)
        self._forget_response()
        self._lost = max(self._lost, 1)
        self.rejected(no_engine())

    def _has_budget(self) -> bool:
        """An engine's own 503 is passed on."""
        return not self._is_routed and super()._has_budget()


def _needs_answer(preparation: Preparation) -> bool:
    turn = preparation.turn
    asks = turn is not None and turn.question is not None
    return preparation.recorder is not None or preparation.hides_usage or asks


def _addresses(services: Services, attempt: Attempt) -> list[str]:
    """The address of the engine that answers, and those of engines that could in its place; none
    if it has none."""
    first = address_of(attempt.answerer.url)
    if first is None:
        return []
    found = [first]
    # The request says which rank it is for, and where a prefill engine's KV is.
    if attempt.decoder is None:
        for worker in _spare(services, attempt):
            address = address_of(worker.url)
            if address is not None and address not in found:
                found.append(address)
    return found


def _spare(services: Services, attempt: Attempt) -> list[Worker]:
    """The engines with the least to do of those that it could have gone to."""
    picked = attempt.worker
    views = {view.name: view.pending_tokens for view in attempt.considered}
    others = [worker for name in views if (worker := services.workers.find(name)) is not None]
    able = [w for w in others if w.url != picked.url and w.rank == picked.rank and w.is_available]
    return nsmallest(_SPARE, able, key=lambda worker: views[worker.id])
