"""The workers that may take a request, whether they have capacity for it, and which of a large
fleet are compared."""

from collections.abc import Callable
from functools import cached_property, reduce
from math import inf
from operator import or_

from scheduler.capacity import Capacity, exceeds_part, has_capacity, is_at_hand
from scheduler.placement import WorkerView, rendezvous
from scheduler.sessions import Sessions
from scheduler.shortlist import SMALL_FLEET, Shortlist, bits_of
from sgl_ext.balancer.routing.attempts import RoutingRequest
from sgl_ext.balancer.routing.prefix.prefixes import HeldBySlot, slower_tokens
from sgl_ext.balancer.routing.worker import DECODE, Worker
from sgl_ext.balancer.routing.workers import Workers

# What fades without a report, such as recent work, is read again within this time, if so many
# requests come that none has to read more than a few workers again.
REREAD_S = 1.0
_MOST_REREAD = 16
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
            return worker in self._among
        return worker is not None and worker.is_available

    @cached_property
    def _among(self) -> set[Worker | None]:
        return {*self.all}

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
        tokens = 0 if held is None else self._tokens(worker, worker.capacity, held)
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

    def exceeds_part(self, worker: Worker, held: HeldBySlot) -> bool:
        """Whether the request is larger than its tenant's part of a worker's memory."""
        if worker.capacity is None:
            return False
        tokens, others = self._tokens(worker, worker.capacity, held), worker.peer_load.in_flight
        return exceeds_part(worker.capacity, worker.running, tokens, others, self._routing.tenant)

    def _tokens(self, worker: Worker, capacity: Capacity, held: HeldBySlot) -> int:
        routing = self._routing
        missing_tokens = max(routing.prompt_tokens - held[worker.slot].expected_tokens, 0)
        return capacity.needed(routing.prompt_tokens, missing_tokens, routing.output_tokens)

    def may_go_beyond(self, worker: Worker, prompt_tokens: int, held_tokens: int) -> bool:
        """Whether a worker, which holds so much of the prompt, may be sent the request beyond its
        capacity."""
        capacity = worker.capacity
        if capacity is None or not self._routing.runs or worker.role:
            return False
        if worker.in_flight + worker.peer_load.in_flight >= self._worker_limit:
            return False
        return worker.running.beyond < capacity.limit and is_at_hand(prompt_tokens, held_tokens)


class Fleet:
    """All workers as requests see them, and which of them a decision compares.

    Up to SMALL_FLEET workers, it compares all. The shortlist of a larger fleet follows the loads
    that this process puts on workers and those that engines report; and each decision reads some
    workers again, in turn, the more the longer ago the last decision was.
    """

    def __init__(self, workers: Workers, sessions: Sessions) -> None:
        self._workers = workers
        self._sessions = sessions
        self._shortlist = Shortlist()
        self._next = self._read = 0
        self._reread_s = -inf

    @property
    def is_large(self) -> bool:
        return len(self._workers.all) > SMALL_FLEET

    @property
    def mean_sessions(self) -> float | None:
        """The mean of all workers' session tokens; None where a decision compares all workers."""
        return self._sessions.all_tokens / len(self._workers.all) if self.is_large else None

    def view(self, worker: Worker, find: Callable[[int], int], now_s: float) -> WorkerView:
        """find: the tokens that are held under a slot."""
        held_tokens, host_tokens, shared_tokens = find(worker.slot), 0, 0
        if worker.has_tiers:
            host_tokens, shared_tokens = slower_tokens(worker, held_tokens, find)
        return WorkerView(
            worker.id,
            held_tokens,
            worker.total_pending_tokens(now_s),
            worker.decoding + worker.peer_load.decoding,
            worker.recent_prefill.at(now_s),
            self._sessions.live_tokens(worker.slot),
            1.0 if worker.recovered_s is None else worker.warmth(now_s),
            host_tokens,
            shared_tokens,
            worker.load_share,
            worker.shared_share,
            *worker.weights,
        )

    def load_changed(self, worker: Worker, now_s: float) -> None:
        """Call it when the load of a worker has changed."""
        if self.is_large and worker.role != DECODE:
            view = self.view(worker, _nothing, now_s)
            self._shortlist.put(worker.slot, rendezvous(0, worker.id), view)

    def forget(self, worker: Worker) -> None:
        """A worker is gone, or takes no requests."""
        self._shortlist.remove(worker.slot)

    def compared(
        self,
        candidates: Candidates,
        held: HeldBySlot,
        home: Worker | None,
        takes: Callable[[Worker], bool],
        now_s: float,
    ) -> list[Worker]:
        """The candidates that take a request, or of a large fleet those of them that a decision
        compares. home: the worker of its session."""
        if not self.is_large:
            return [worker for worker in candidates.all if takes(worker)]
        self._reread(now_s)
        groups, at = self._groups(held), self._workers.at_slot

        def takes_slot(slot: int) -> bool:
            worker = at(slot)
            return worker is not None and worker in candidates and takes(worker)

        slots = self._shortlist.pick(groups, takes_slot, is_new=True)
        if home is not None:
            own = [home.slot] if takes_slot(home.slot) else []
            moves = self._shortlist.pick(groups, takes_slot, is_new=False)
            slots = [*dict.fromkeys((*own, *moves, *slots))]
        found = (at(slot) for slot in slots)
        return [worker for worker in found if worker is not None]

    def _reread(self, now_s: float) -> None:
        workers = self._workers.all
        due, each_s, passed_s = len(workers), REREAD_S / len(workers), now_s - self._reread_s
        if due == self._read:
            due = min(int(passed_s / each_s), _MOST_REREAD)
            if not due:
                return
        self._read = len(workers)
        for number in range(self._next, self._next + due):
            self.load_changed(workers[number % len(workers)], now_s)
        self._next = (self._next + due) % len(workers)
        # What is left of a worker's turn counts for the next decision.
        self._reread_s = now_s - min(max(passed_s - due * each_s, 0.0), each_s)

    def _groups(self, held: HeldBySlot) -> list[int]:
        """Bitmasks of the workers that hold the same, on any tier, the most first."""
        groups = held.by_tokens()
        if not self._workers.has_tiers:
            return groups
        return [reduce(or_, map(self._workers.mask_of, bits_of(mask))) for mask in groups]


def _nothing(slot: int) -> int:
    return 0
