"""Which agents' requests the admission queue holds back so that the others fit into memory.

`scheduler.agent_admission` decides for each worker that a request may go to: the one that has
its conversation, or all. What agents use is counted as attempts begin and end
(`scheduler.working_set`). A worker that reports no memory holds nothing back. In a large
fleet a new agent looks at some workers at a time, in turn.
"""

from itertools import islice

from scheduler.agent_admission import Demand, Pool, has_time, is_sent
from scheduler.working_set import WorkingSet
from sgl_ext.balancer.routing.attempts import RoutingRequest
from sgl_ext.balancer.routing.candidates import allowed
from sgl_ext.balancer.routing.prefix.prefixes import HeldBySlot
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import DECODE, Worker

MOST_COMPARED = 32


class AgentGate:
    """hold_s: how long a request is held back at most; 0: never."""

    def __init__(self, router: Router, hold_s: float) -> None:
        self._router = router
        self._next = 0
        self.change(hold_s)

    def __len__(self) -> int:
        """How many agents it knows."""
        return len(self._router.attempts.working_set or ())

    def change(self, hold_s: float) -> None:
        """Changes how long a request is held back. What agents use is counted while it is not 0."""
        self.hold_s = hold_s
        attempts = self._router.attempts
        if not hold_s:
            attempts.working_set = None
        elif attempts.working_set is None:
            attempts.working_set = WorkingSet()

    def holds(self, routing: RoutingRequest, waited_s: float, now_s: float) -> bool:
        """Whether a request is held back."""
        working_set = self._router.attempts.working_set
        if working_set is None or routing.agent is None or not routing.runs:
            return False
        working_set.expire(now_s)
        held: HeldBySlot | None = None
        workers = self._workers(routing)
        for worker in workers:
            if worker.pool_tokens <= 0 or self._has_time(worker, now_s):
                return False
            pool = self._pool(routing, worker, working_set)
            held = held or self._router.prefixes.lookup(routing.chain)
            demand = self._demand(routing, worker, held, working_set)
            if is_sent(demand, pool, waited_s, self.hold_s, self._router.tenants.weights):
                return False
        return bool(workers)

    def held_back(self, routing: RoutingRequest) -> None:
        """A request is held back from now on."""
        working_set = self._router.attempts.working_set
        if working_set is not None and routing.agent is not None:
            working_set.waits(routing.agent)

    def home(self, routing: RoutingRequest) -> int | None:
        """The slot of the worker that has a request's session."""
        sessions = self._router.attempts.sessions
        home = None if routing.session is None else sessions.home(routing.session)
        return None if home is None else home[0]

    def _workers(self, routing: RoutingRequest) -> list[Worker]:
        """Where a request may go: where its session is, or else anywhere."""
        workers, home = self._router.workers, self.home(routing)
        worker = None if home is None else workers.at_slot(home)
        found = [worker] if worker is not None and worker.is_available else workers.all
        found = [w for w in allowed(found, routing.only) if w.is_available and w.role != DECODE]
        if len(found) <= MOST_COMPARED:
            return found
        begin = self._next = (self._next + MOST_COMPARED) % len(found)
        return [*islice((*found[begin:], *found[:begin]), MOST_COMPARED)]

    @staticmethod
    def _has_time(worker: Worker, now_s: float) -> bool:
        in_flight = worker.in_flight + worker.peer_load.in_flight
        pending_tokens = worker.total_pending_tokens(now_s)
        return has_time(in_flight, pending_tokens, worker.pace.share(now_s))

    def _pool(self, routing: RoutingRequest, worker: Worker, working_set: WorkingSet) -> Pool:
        slot, agent = worker.slot, routing.agent or 0
        return Pool(
            worker.pool_tokens,
            working_set.used(slot, agent),
            working_set.less_important(slot, routing.tenant, routing.priority, agent),
            working_set.awaited(slot, agent),
        )

    def _demand(
        self,
        routing: RoutingRequest,
        worker: Worker,
        by_slot: HeldBySlot,
        working_set: WorkingSet,
    ) -> Demand:
        held, prefixes = by_slot.of(worker), self._router.prefixes
        tokens = prefixes.prompt_tokens(routing.chain, held, routing.prompt_tokens)
        held_tokens = held.expected_tokens + held.slower_tokens
        own_tokens = working_set.own_tokens(routing.agent or 0, tokens, held_tokens)
        return Demand(routing.tenant, tokens, held_tokens, own_tokens)
