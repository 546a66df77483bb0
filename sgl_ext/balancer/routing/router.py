"""Where each request goes: reads it for routing, and places it on a worker. No HTTP, no waiting.

    read --> place --> an attempt, whose life is in `attempts`

`read` runs once for a request, `place` once for each attempt.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf
from typing import Any

from scheduler.placing.placement import (
    Placement,
    PlacementRequest,
    WorkerView,
    chosen_of,
    place,
    score_all,
    stays,
)
from scheduler.placing.speeds import EVEN
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import FOLLOW_TOKENS, Attempt, Attempts, RoutingRequest
from sgl_ext.balancer.routing.candidates import Candidates, Fleet, allowed
from sgl_ext.balancer.routing.prefixes import HeldBySlot, Prefixes
from sgl_ext.balancer.routing.prompt import Prompt, read_prompt
from sgl_ext.balancer.routing.worker import DECODE, Worker
from sgl_ext.balancer.routing.workers import Workers, can_answer
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.segments import Chain
from sgl_ext.requests.session import TENANT_HEADER, is_final
from sgl_ext.tenants import Tenants

# Of more workers, a session that stays home lists its own and those that hold most of the prompt.
MOST_LISTED = 8
_NO_VIEW = WorkerView("")


@dataclass(eq=False)
class Router:
    """Places requests on workers. One a process; not thread-safe.

    worker_limit: how many requests may be in flight at a worker in any case.
    lists_others: whether in a large fleet, too, the attempt of a session that stays at its worker
        lists others.
    on_capacity: called whenever a worker may have more capacity.
    """

    workers: Workers
    metrics: Metrics
    worker_limit: int = 1024
    sort_tools: bool = False
    tenants: Tenants = field(default_factory=Tenants)
    preemption_threshold: int = 10
    clock: Callable[[], float] = time.monotonic
    prefixes: Prefixes = field(default_factory=Prefixes)
    lists_others: bool = False

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.prefixes, self.clock)
        self.fleet = Fleet(self.workers, self.attempts.sessions)
        sessions, tables = self.attempts.sessions, self.metrics.tables
        self.prefixes.add_tables(tables)
        tables.add("sessions", sessions.__len__, lambda: sessions.limit)
        self.on_capacity: list[Callable[[], None]] = []
        self.attempts.on_end.append(self.capacity_changed)
        self.workers.on_leave.append(self._forget)

    def read(
        self,
        path: str,
        headers: Mapping[str, str],
        body: Any,
        size_bytes: int,
        *,
        warms: bool = False,
    ) -> RoutingRequest:
        """Reads a parsed and stripped body for routing. `headers` has lower-case names."""
        ceiling = self.tenants.asking(headers).max_priority
        prompt = read_prompt(
            of_path(path), headers, body, size_bytes, ceiling, sort_tools=self.sort_tools
        )
        return self.routing_of(prompt, headers, warms=warms)

    def routing_of(
        self, prompt: Prompt, headers: Mapping[str, str], *, warms: bool = False
    ) -> RoutingRequest:
        """How to route a request with this prompt. `headers` has lower-case names."""
        return RoutingRequest(
            prompt.chain,
            prompt.session,
            prompt.prefix,
            self.prefixes.estimate_tokens(prompt.size_bytes),
            is_final(headers),
            prompt.importance.priority,
            prompt.importance.output_tokens or 0,
            headers.get(TENANT_HEADER, ""),
            runs=not warms,
            warms=warms,
        )

    def place(
        self, routing: RoutingRequest, tried: set[Worker], *, waits_for_home: bool = False
    ) -> Attempt | None:
        """Begins an attempt on a worker, one that is not in `tried` if there is one.

        None if no worker has capacity, or if the worker that its session stays on has none and
        the request `waits_for_home`.
        """
        now_s = self.clock()
        if unconfirmed := self.prefixes.in_flight.expire(now_s):
            self.metrics.unconfirmed_prefixes.inc(unconfirmed)
        self.attempts.sessions.expire(now_s)
        self._learn(now_s)
        candidates = self._candidates(routing, tried)
        held = self.prefixes.lookup(routing.chain)
        self.prefixes.learn_size(routing.chain, held)
        request = self._placement_request(routing, held)
        home, view = self._find_home(request, candidates, held, now_s)
        has_capacity = partial(candidates.has_capacity, held=held)
        if home is not None and has_capacity(home):
            views = [view]
            if self.lists_others or not self.fleet.is_large:
                views = self._views_beside(home, view, candidates, held, now_s)
            return self._begin(routing, home, "home", held, views, candidates)
        known = None if request.home is None else self.workers.find(request.home)
        open_workers = self.fleet.compared(candidates, held, known, has_capacity, now_s)
        if not open_workers:
            return None if home is None else self._beyond(routing, home, view, held, candidates)
        views = [self.fleet.view(w, held.tokens, now_s) for w in open_workers]
        if waits_for_home and home is not None:
            more_saved = view.saved - max(other.saved for other in views)
            if more_saved >= FOLLOW_TOKENS:
                return None
        chosen = place(request, views, self.fleet.mean_sessions)
        assert chosen is not None, "some worker has capacity"
        reason = chosen.reason if home is None else "moved"
        worker = next(w for w in open_workers if w.id == chosen.worker)
        return self._begin(routing, worker, reason, held, views, candidates)

    def uncached_tokens(self, routing: RoutingRequest) -> int:
        """An estimate of the tokens of a prompt that no worker holds, on any tier."""
        most = self.prefixes.lookup(routing.chain).most
        tokens = self.prefixes.prompt_tokens(routing.chain, most, routing.prompt_tokens)
        return max(tokens - most.expected_tokens, 0)

    def compute_s(self, tokens: int) -> float:
        """How long the engines together take to compute so many tokens, as fast as they computed
        others; 0 if none says how fast."""
        speed = sum(w.pace.tokens_per_s for w in self.workers.all if w.is_available)
        return tokens / speed if speed > 0 else 0.0

    def _learn(self, now_s: float) -> None:
        """Takes over what was learned of the workers' speeds."""
        speeds = self.attempts.speeds
        for slot in speeds.refresh(now_s):
            if (worker := self.workers.at_slot(slot)) is not None:
                worker.weights = speeds.weights(slot)
                self.fleet.load_changed(worker, now_s)

    def place_at_hand(self, routing: RoutingRequest, tried: set[Worker]) -> Attempt | None:
        """Begins an attempt on the worker that its session stays on, beyond the worker's capacity.
        None if the prompt is not at hand there, or if too many were sent beyond it."""
        now_s = self.clock()
        candidates, held = self._candidates(routing, tried), self.prefixes.lookup(routing.chain)
        request = self._placement_request(routing, held)
        home, view = self._find_home(request, candidates, held, now_s)
        return None if home is None else self._beyond(routing, home, view, held, candidates)

    def _beyond(
        self,
        routing: RoutingRequest,
        home: Worker,
        view: WorkerView,
        held: HeldBySlot,
        candidates: Candidates,
    ) -> Attempt | None:
        there = held[home.slot]
        tokens = self.prefixes.prompt_tokens(routing.chain, there, routing.prompt_tokens)
        if not candidates.may_go_beyond(home, tokens, there.tokens):
            return None
        return self._begin(routing, home, "home", held, [view], candidates, is_beyond=True)

    def _begin(
        self,
        routing: RoutingRequest,
        worker: Worker,
        reason: str,
        held: HeldBySlot,
        views: list[WorkerView],
        candidates: Candidates,
        *,
        is_beyond: bool = False,
    ) -> Attempt:
        placement, decoder = Placement(worker.id, reason), None
        if worker.role:
            decoder = candidates.decoder
        attempt = self.attempts.begin(
            routing, worker, placement, held.of(worker), views, decoder, is_beyond=is_beyond
        )
        attempt.held_at = partial(self._held_at, held)
        if reason != "home":  # or a burst of sessions would all look at the same few workers
            self.fleet.load_changed(worker, self.clock())
        return attempt

    def _held_at(self, held: HeldBySlot, name: str) -> int | None:
        """What a worker was expected to hold; None if it takes no requests."""
        worker = self.workers.find(name)
        if worker is None or not worker.is_available or worker.role == DECODE:
            return None
        found = held.of(worker)
        return found.expected_tokens + found.slower_tokens

    def take_over(self, attempt: Attempt, worker: Worker) -> Attempt:
        """Ends an attempt whose worker failed, and begins one on the worker that serves the
        request in its place: somebody else chose it."""
        self.attempts.fail(attempt, by_worker=True)
        held = self.prefixes.lookup(attempt.routing.chain)
        placement = Placement(worker.id, "moved")
        begun = self.attempts.begin(attempt.routing, worker, placement, held.of(worker))
        self.fleet.load_changed(worker, self.clock())
        return begun

    def has_capacity_for(
        self, routing: RoutingRequest, tried: set[Worker], *, at_home: bool = False
    ) -> bool:
        """Whether some worker, or that of the request's session, has capacity if memory suffices.

        It does not look the prompt up. If no worker has capacity, none has any for a lower
        priority of the same tenant.
        """
        candidates = self._candidates(routing, tried)
        asked: Iterable[Worker] = candidates.all
        if at_home and routing.session is not None:
            home = self.attempts.sessions.home(routing.session)
            asked = [w for w in asked if home and w.slot == home[0]] or asked
        return any(candidates.has_capacity(w) for w in asked)

    def exceeds_part(self, routing: RoutingRequest, tried: set[Worker]) -> bool:
        """Whether a request is larger than its tenant's part of the memory of each worker."""
        candidates, held = self._candidates(routing, tried), self.prefixes.lookup(routing.chain)
        return all(candidates.exceeds_part(worker, held) for worker in candidates.all)

    def any_available(
        self, besides: Collection[Worker] = (), only: frozenset[str] | None = None
    ) -> bool:
        """Whether some worker takes requests, even if it has no capacity now.

        only: as of a `RoutingRequest`."""
        workers = allowed(self.workers.all, only)
        return can_answer(w for w in workers if w.is_available and w not in besides)

    def may_wait(self, only: frozenset[str] | None = None) -> bool:
        """Whether a request that finds no worker now can wait for one. only: as above."""
        workers = allowed(self.workers.all, only)
        return can_answer(w for w in workers if w.is_available or w.is_expected)

    def load_reported(self, worker: Worker) -> None:
        """An engine has reported its load."""
        self.fleet.load_changed(worker, self.clock())
        self.capacity_changed()

    def capacity_changed(self) -> None:
        """An attempt has ended, or an engine or a peer has reported its load."""
        for action in self.on_capacity:
            action()

    def views(self, chain: Chain) -> list[tuple[Worker, WorkerView]]:
        """The available workers, each with its view for a prompt."""
        now_s = self.clock()
        held = self.prefixes.lookup(chain)
        available = [w for w in self.workers.all if w.is_available and w.role != DECODE]
        return [(w, self.fleet.view(w, held.tokens, now_s)) for w in available]

    def explain(self, routing: RoutingRequest) -> dict[str, Any]:
        """What this request would cost on each worker, and where it would go. Changes nothing."""
        now_s = self.clock()
        held = self.prefixes.lookup(routing.chain)
        candidates = self._candidates(routing, set())
        workers = [worker for worker in self.workers.all if worker.role != DECODE]
        views = {w: self.fleet.view(w, held.tokens, now_s) for w in workers}
        request = self._placement_request(routing, held)
        home = None if request.home is None else self.workers.find(request.home)
        compared = self.fleet.compared(candidates, held, home, lambda _: True, now_s)
        mean_sessions = self.fleet.mean_sessions
        placement = place(request, [views[w] for w in compared], mean_sessions)
        scores = score_all(request, [*views.values()], mean_sessions, is_new=request.home is None)
        return {
            "segments": len(routing.chain.hashes),
            "tools": routing.chain.tools,
            "prompt_tokens": routing.prompt_tokens,
            "session": None if routing.session is None else f"{routing.session:032x}",
            "home": request.home,
            "worker": None if placement is None else placement.worker,
            "reason": "no worker is open" if placement is None else placement.reason,
            "workers": [
                {
                    **cost._asdict(),
                    "open": worker.is_available,
                    "has_room": candidates.has_capacity(worker, held),
                    "held_tokens": view.held_tokens,
                    "host_tokens": view.host_tokens,
                    "shared_tokens": view.shared_tokens,
                    "pinned_tokens": worker.pins.tokens_of(routing.chain.hashes),
                    "live_session_tokens": view.session_tokens,
                    "decoding_requests": view.decoding,
                    "warmth": view.warmth,
                    "prefill_weight": view.prefill_weight,
                    "decode_weight": view.decode_weight,
                }
                for cost, (worker, view) in zip(scores, views.items(), strict=True)
            ],
        }

    def _forget(self, worker: Worker) -> None:
        """Forgets what was known of a worker that is gone, and of its cache."""
        for slot in self.workers.slots_of(worker):
            self.prefixes.forget_worker(slot)
        self.attempts.sessions.forget_worker(worker.slot)
        self.attempts.speeds.forget(worker.slot)
        worker.weights = EVEN
        if self.attempts.working_set is not None:
            self.attempts.working_set.forget_worker(worker.slot)
        self.fleet.forget(worker)
        worker.pins.clear()
        worker.clear_load()

    def _candidates(self, routing: RoutingRequest, tried: set[Worker]) -> Candidates:
        return Candidates(
            self.workers, routing, tried, self.worker_limit, self.preemption_threshold
        )

    def _find_home(
        self, request: PlacementRequest, candidates: Candidates, held: HeldBySlot, now_s: float
    ) -> tuple[Worker | None, WorkerView]:
        """The worker that the request's session stays on, and its view. While little waits there,
        the time does not grow with the number of workers."""
        home = None if request.home is None else self.workers.find(request.home)
        if home is None or home not in candidates:
            return None, _NO_VIEW
        view = self.fleet.view(home, held.tokens, now_s)
        at = self.workers.at_slot
        most: float
        if self.workers.has_tiers:
            find = defaultdict(int, held.holders()).__getitem__
            views = (self.fleet.view(w, find, now_s) for w in candidates.all if w is not home)
            most = max((other.saved for other in views), default=0)
        else:
            most = held.most_tokens(home.slot, lambda slot: at(slot) in candidates)
        reason = stays(request, view, most)
        if reason == "moved":
            found = self.fleet.compared(candidates, held, home, lambda w: w is not home, now_s)
            waits = (w.weights.prefill * w.total_pending_tokens(now_s) for w in found)
            reason = stays(request, view, most, min(waits, default=inf))
        return home if reason == "home" else None, view

    def _views_beside(
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
        holders = (self.workers.at_slot(slot) for slot, _ in held.holders())
        for worker in chain(holders, self.workers.all):
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

    def _placement_request(self, routing: RoutingRequest, held: HeldBySlot) -> PlacementRequest:
        """The request with its session's worker: the remembered one, or the one that holds most
        of the session."""
        home_id, last_tokens, chain = None, 0, routing.chain
        home = None if routing.session is None else self.attempts.sessions.home(routing.session)
        if home is not None:
            slot, last_tokens = home
            if (worker := self.workers.at_slot(slot)) is not None:
                home_id = worker.id
        elif chain.session is not None:
            begin = chain.hashes.index(chain.session) + 1
            tokens = dict(held.holders(begin))
            most = max(tokens.values(), default=0)
            slots = [slot for slot, held_tokens in tokens.items() if held_tokens == most]
            # Slots differ between balancers, so that they are no reason to prefer a worker.
            homes = [worker.id for slot in slots if (worker := self.workers.at_slot(slot))]
            home_id = chosen_of(routing.prefix, homes) if homes else None
        answer_tokens = self.attempts.speeds.answer_tokens(routing.output_tokens)
        return PlacementRequest(
            routing.prompt_tokens, routing.prefix, home_id, last_tokens, answer_tokens
        )
