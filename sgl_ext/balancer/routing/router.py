"""Where each request goes: reads it for routing, and places it on a worker. No HTTP, no waiting.

    read --> place --> an attempt, whose life is in `attempts`

`read` runs once for a request, `place` once for each attempt.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from scheduler.placement import Placement, WorkerView, place
from scheduler.speeds import EVEN
from scheduler.suspects import Suspects
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import FOLLOW_TOKENS, Attempt, Attempts, RoutingRequest
from sgl_ext.balancer.routing.candidates import Candidates, Fleet, allowed
from sgl_ext.balancer.routing.homes import Homes
from sgl_ext.balancer.routing.prefix.prefixes import HeldBySlot, Prefixes
from sgl_ext.balancer.routing.prompt import Prompt, read_prompt
from sgl_ext.balancer.routing.worker import DECODE, Worker
from sgl_ext.balancer.routing.workers import Workers, can_answer
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import is_final, shown_name
from sgl_ext.reading.segments import Chain
from sgl_ext.tenants import Tenants
from sgl_ext.wire.headers import TENANT_HEADER


@dataclass(eq=False)
class Router:
    """Places requests on workers. One a process; not thread-safe.

    worker_limit: how many requests may be in flight at a worker in any case.
    lists_others: whether in a large fleet, too, the attempt of a session that stays at its worker
        lists others.
    hashes_sessions: whether sessions are named by hashes.
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
    hashes_sessions: bool = False

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.prefixes, self.clock)
        self.suspects = Suspects()
        self.fleet = Fleet(self.workers, self.attempts.sessions)
        self.homes = Homes(self.workers, self.attempts, self.fleet)
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
        ceiling = self.tenants.of_headers(headers).max_priority
        prompt = read_prompt(
            of_path(path), headers, body, size_bytes, ceiling, sort_tools=self.sort_tools
        )
        return self.routing_of(prompt, headers, warms=warms)

    def routing_of(
        self, prompt: Prompt, headers: Mapping[str, str], *, warms: bool = False
    ) -> RoutingRequest:
        """How to route a request with this prompt. `headers` has lower-case names."""
        tenant = headers.get(TENANT_HEADER, "")
        name = shown_name(prompt.stated, tenant, hashes=self.hashes_sessions)
        return RoutingRequest(
            prompt.chain,
            prompt.session,
            prompt.prefix,
            self.prefixes.estimate_tokens(prompt.size_bytes),
            is_final(headers),
            prompt.importance.priority,
            prompt.importance.output_tokens or 0,
            tenant,
            runs=not warms,
            warms=warms,
            name=name,
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
        candidates = self.candidates(routing, tried)
        held = self.prefixes.lookup(routing.chain)
        self.prefixes.learn_size(routing.chain, held)
        request = self.homes.request_of(routing, held)
        home, view = self.homes.find(request, candidates, held, now_s)
        has_capacity = partial(candidates.has_capacity, held=held)
        if home is not None and has_capacity(home):
            views = [view]
            if self.lists_others or not self.fleet.is_large:
                views = self.homes.views_beside(home, view, candidates, held, now_s)
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
        candidates, held = self.candidates(routing, tried), self.prefixes.lookup(routing.chain)
        request = self.homes.request_of(routing, held)
        home, view = self.homes.find(request, candidates, held, now_s)
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
            routing,
            worker,
            placement,
            held.of(worker),
            views,
            decoder,
            is_beyond=is_beyond,
            held_at=partial(self._held_at, held),
        )
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
        candidates = self.candidates(routing, tried)
        workers: Iterable[Worker] = candidates.all
        if at_home and routing.session is not None:
            home = self.attempts.sessions.home(routing.session)
            workers = [w for w in workers if home and w.slot == home[0]] or workers
        return any(candidates.has_capacity(w) for w in workers)

    def exceeds_part(self, routing: RoutingRequest, tried: set[Worker]) -> bool:
        """Whether a request is larger than its tenant's part of the memory of each worker."""
        candidates, held = self.candidates(routing, tried), self.prefixes.lookup(routing.chain)
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
        return can_answer(w for w in workers if w.is_available or w.is_expected or w.is_stalled)

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

    def candidates(self, routing: RoutingRequest, tried: set[Worker]) -> Candidates:
        """The workers that a request may go to."""
        return Candidates(
            self.workers, routing, tried, self.worker_limit, self.preemption_threshold
        )
