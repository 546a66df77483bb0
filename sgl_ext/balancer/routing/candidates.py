"""The workers that may take a request, and whether they have capacity for it."""

from functools import cached_property

from scheduler.capacity import has_capacity
from sgl_ext.balancer.routing.attempts import RoutingRequest
from sgl_ext.balancer.routing.prefixes import HeldBySlot
from sgl_ext.balancer.routing.worker import DECODE, Worker
from sgl_ext.balancer.routing.workers import Workers

_NO_PREFIX = HeldBySlot()


def allowed(workers: list[Worker], only: frozenset[str] | None) -> list[Worker]:
    """Those of the workers whose URL is in `only`; all for None."""
    return workers if only is None else [w for w in workers if w.url in only]


class Candidates:
    """The available workers that the request may go to, without those tried if there are others.
    Without a decode engine that has capacity, a prefill engine is none. To ask for one worker does
    not visit all, unless some were tried or excluded, or engines have roles.

    worker_limit: how many requests may be in flight at a worker in any case.
    threshold: by how much a request's priority must exceed another's to preempt it.
    """

    def __init__(
        self,
        workers: Workers,
        routing: RoutingRequest,
        tried: set[Worker],
        worker_limit: int,
        threshold: int,
    ) -> None:
        self._workers = workers
        self._routing = routing
        self._tried = tried
        self._worker_limit = worker_limit
        self._threshold = threshold
        self._needs_decoder = workers.has_roles and routing.runs

    def __contains__(self, worker: Worker | None) -> bool:
        if self._tried or self._workers.has_roles or self._routing.only is not None:
            return worker in self.all
        return worker is not None and worker.is_available

    @cached_property
    def all(self) -> list[Worker]:
        """All of them."""
        found = allowed(self._workers.all, self._routing.only)
        found = [w for w in found if w.is_available]
        if self._workers.has_roles:
            found = [w for w in found if w.role != DECODE]
        if self._tried:
            found = [w for w in found if w not in self._tried] or found
        if self._needs_decoder and self.decoder is None:
            found = [w for w in found if not w.role]
        return found

    @cached_property
    def decoder(self) -> Worker | None:
        """The decode engine with the least load that has capacity for the request; one that was not
        tried if there is one. It gets all KV from the prefill engine."""
        if not self._needs_decoder:
            return None
        decoders = [w for w in self._workers.all if w.role == DECODE and w.is_available]
        decoders = allowed(decoders, self._routing.only)
        able = [w for w in decoders if self.has_capacity(w, _NO_PREFIX)]
        able = [w for w in able if w not in self._tried] or able
        return min(able, key=lambda w: (w.in_flight + w.peer_load.in_flight, w.id), default=None)

    def has_capacity(self, worker: Worker, held: HeldBySlot | None = None) -> bool:
        """Whether a worker has capacity for the request; without `held`, for one of no tokens."""
        routing, peers = self._routing, worker.peer_load
        if worker.in_flight + peers.in_flight >= self._worker_limit:
            return False
        if worker.capacity is None or not routing.runs:
            return True
        tokens = 0
        if held is not None:
            missing_tokens = max(routing.prompt_tokens - held[worker.slot].expected_tokens, 0)
            tokens = worker.capacity.needed(
                routing.prompt_tokens, missing_tokens, routing.output_tokens
            )
        return has_capacity(
            worker.capacity,
            worker.running,
            routing.priority,
            tokens,
            self._threshold,
            peers.in_flight,
            peers.pending_tokens,
            routing.tenant,
        )
