"""The worker that a request's session stays on, which has its conversation."""

import itertools
from collections import defaultdict
from math import inf

from scheduler.placement import PlacementRequest, WorkerView, chosen_of, stays
from sgl_ext.balancer.routing.attempts import Attempts, RoutingRequest
from sgl_ext.balancer.routing.candidates import Candidates, Fleet
from sgl_ext.balancer.routing.prefix.prefixes import HeldBySlot
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers

# Of more workers, a session that stays home lists its own and those that hold most of the prompt.
MOST_LISTED = 8
_NO_VIEW = WorkerView("")


class Homes:
    """Finds homes. Sessions are remembered in `attempts`."""

    def __init__(self, workers: Workers, attempts: Attempts, fleet: Fleet) -> None:
        self._workers = workers
        self._attempts = attempts
        self._fleet = fleet

    def request_of(self, routing: RoutingRequest, held: HeldBySlot) -> PlacementRequest:
        """The request with its session's worker: the remembered one, or the one that holds most
        of the session."""
        home_id, last_tokens, chain = None, 0, routing.chain
        home = None if routing.session is None else self._attempts.sessions.home(routing.session)
        if home is not None:
            slot, last_tokens = home
            if (worker := self._workers.at_slot(slot)) is not None:
                home_id = worker.id
        elif chain.session is not None:
            begin = chain.hashes.index(chain.session) + 1
            tokens = dict(held.holders(begin))
            most = max(tokens.values(), default=0)
            slots = [slot for slot, held_tokens in tokens.items() if held_tokens == most]
            # Slots differ between balancers, so that they are no reason to prefer a worker.
            homes = [worker.id for slot in slots if (worker := self._workers.at_slot(slot))]
            home_id = chosen_of(routing.prefix, homes) if homes else None
        answer_tokens = self._attempts.speeds.answer_tokens(routing.output_tokens)
        return PlacementRequest(
            routing.prompt_tokens, routing.prefix, home_id, last_tokens, answer_tokens
        )

    def find(
        self, request: PlacementRequest, candidates: Candidates, held: HeldBySlot, now_s: float
    ) -> tuple[Worker | None, WorkerView]:
        """The worker that the request's session stays on, and its view. While little waits there,
        the time does not grow with the number of workers."""
        home = None if request.home is None else self._workers.find(request.home)
        if home is None or home not in candidates:
            return None, _NO_VIEW
        view = self._fleet.view(home, held.tokens, now_s)
        at = self._workers.at_slot
        most: float
        if self._workers.has_tiers:
            find = defaultdict(int, held.holders()).__getitem__
            views = (self._fleet.view(w, find, now_s) for w in candidates.all if w is not home)
            most = max((other.saved for other in views), default=0)
        else:
            most = held.most_tokens(home.slot, lambda slot: at(slot) in candidates)
        reason = stays(request, view, most)
        if reason == "moved":
            found = self._fleet.compared(candidates, held, home, lambda w: w is not home, now_s)
            waits = (w.weights.prefill * w.total_pending_tokens(now_s) for w in found)
            reason = stays(request, view, most, min(waits, default=inf))
        return home if reason == "home" else None, view

    def views_beside(
        self,
        home: Worker,
        view: WorkerView,
        candidates: Candidates,
        held: HeldBySlot,
        now_s: float,
    ) -> list[WorkerView]:
        """The worker of a session that stays, and some others: those that hold most of the prompt
        first."""
        views = {home: view}
        holders = (self._workers.at_slot(slot) for slot, _ in held.holders())
        for worker in itertools.chain(holders, self._workers.all):
            if len(views) == MOST_LISTED:
                break
            if worker not in views and worker is not None and worker in candidates:
                tokens = held.of(worker)
                views[worker] = WorkerView(
                    worker.id,
                    tokens.expected_tokens,
                    worker.total_pending_tokens(now_s),
                    host_tokens=tokens.host_tokens,
                    shared_tokens=tokens.shared_tokens,
                    load_share=worker.load_share,
                    shared_share=worker.shared_share,
                    prefill_weight=worker.weights.prefill,
                    decode_weight=worker.weights.decode,
                )
        return [*views.values()]
