"""Where each request goes: reads it for routing, and places it on a worker. No HTTP, no waiting.

    read --> place --> an attempt, whose life is in `attempts`

`read` runs once for a request, `place` once for each attempt.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.capacity import has_capacity
from scheduler.placement import (
    Placement,
    PlacementRequest,
    WorkerView,
    chosen_of,
    place,
    score,
    stays,
)
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import FOLLOW_TOKENS, Attempt, Attempts, RoutingRequest
from sgl_ext.balancer.routing.prefixes import HeldBySlot, HeldPrefix, Prefixes
from sgl_ext.balancer.routing.prompt import Prompt, read_prompt
from sgl_ext.balancer.routing.worker import DECODE, Worker
from sgl_ext.balancer.routing.workers import Workers, can_answer
from sgl_ext.requests.segments import Chain
from sgl_ext.requests.session import is_final
from sgl_ext.tenants import Tenants

_NO_PREFIX = HeldBySlot(HeldPrefix)


@dataclass(eq=False)
class Router:
    """Places requests on workers. One a process; not thread-safe.

    worker_limit: how many requests may be in flight at a worker in any case.
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

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.prefixes, self.clock)
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
        prompt = read_prompt(path, headers, body, size_bytes, ceiling, sort_tools=self.sort_tools)
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
            self.tenants.asking(headers).name,
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
        candidates = self._candidates(tried)
        decoder = None
        if self.workers.has_roles and routing.runs:
            decoder = self._decoder(routing, tried)
            if decoder is None:
                candidates = [w for w in candidates if not w.role]
        if not any(self._has_capacity(w, routing) for w in candidates):
            return None
        held = self.prefixes.lookup(routing.chain)
        open_workers = [w for w in candidates if self._has_capacity(w, routing, held)]
        if not open_workers:
            return None
        request = self._placement_request(routing, held)
        home, views = self._find_home(request, candidates, held, now_s)
        if home is not None and home in open_workers:
            placement = Placement(home.id, "home")
            decoder = decoder if home.role else None
            return self.attempts.begin(routing, home, placement, held[home.slot], views, decoder)
        if waits_for_home and home is not None:
            most = max(held[worker.slot].expected_tokens for worker in open_workers)
            if held[home.slot].expected_tokens - most >= FOLLOW_TOKENS:
                return None
        views = [self._view(w, held, now_s) for w in open_workers]
        chosen = place(request, views)
        assert chosen is not None, "some worker has capacity"
        placement = chosen if home is None else Placement(chosen.worker, "moved")
        worker = next(w for w in open_workers if w.id == placement.worker)
        decoder = decoder if worker.role else None
        return self.attempts.begin(routing, worker, placement, held[worker.slot], views, decoder)

    def _decoder(self, routing: RoutingRequest, tried: set[Worker]) -> Worker | None:
        """The decode engine with the least load that has capacity for a request; one that was not
        tried if there is one. It gets all KV from the prefill engine."""
        decoders = [w for w in self.workers.all if w.role == DECODE and w.is_available]
        able = [w for w in decoders if self._has_capacity(w, routing, _NO_PREFIX)]
        able = [w for w in able if w not in tried] or able
        return min(able, key=lambda w: (w.in_flight + w.peer_load.in_flight, w.id), default=None)

    def has_capacity_for(
        self, routing: RoutingRequest, tried: set[Worker], *, at_home: bool = False
    ) -> bool:
        """Whether some worker, or that of the request's session, has capacity if memory suffices.

        It does not look the prompt up. If no worker has capacity, none has any for a lower
        priority of the same tenant.
        """
        candidates = self._candidates(tried)
        if at_home and routing.session is not None:
            home = self.attempts.sessions.home(routing.session)
            candidates = [w for w in candidates if home and w.slot == home[0]] or candidates
        if self.workers.has_roles and routing.runs:
            has_decoder = self._decoder(routing, tried) is not None
            candidates = [w for w in candidates if has_decoder or not w.role]
        return any(self._has_capacity(w, routing) for w in candidates)

    def any_available(self, besides: Collection[Worker] = ()) -> bool:
        """Whether some worker takes requests, even if it has no capacity now."""
        return can_answer(w for w in self.workers.all if w.is_available and w not in besides)

    def may_wait(self) -> bool:
        """Whether a request that finds no worker now can wait for one."""
        return can_answer(w for w in self.workers.all if w.is_available or w.is_expected)

    def capacity_changed(self) -> None:
        """An attempt has ended, or an engine or a peer has reported its load."""
        for action in self.on_capacity:
            action()

    def views(self, chain: Chain) -> list[tuple[Worker, WorkerView]]:
        """The available workers, each with its view for a prompt."""
        now_s = self.clock()
        held = self.prefixes.lookup(chain)
        available = [w for w in self.workers.all if w.is_available and w.role != DECODE]
        return [(worker, self._view(worker, held, now_s)) for worker in available]

    def explain(self, routing: RoutingRequest) -> dict[str, Any]:
        """What this request would cost on each worker, and where it would go. Changes nothing."""
        now_s = self.clock()
        held = self.prefixes.lookup(routing.chain)
        workers = [worker for worker in self.workers.all if worker.role != DECODE]
        views = [self._view(worker, held, now_s) for worker in workers]
        request = self._placement_request(routing, held)
        placement = place(
            request, [v for v, w in zip(views, workers, strict=True) if w.is_available]
        )
        scores = [score(request, view, is_new=request.home is None) for view in views]
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
                    "has_room": self._has_capacity(worker, routing, held),
                    "held_tokens": view.held_tokens,
                    "pinned_tokens": worker.pins.tokens_of(routing.chain.hashes),
                    "live_session_tokens": view.session_tokens,
                    "decoding_requests": view.decoding,
                    "warmth": view.warmth,
                }
                for cost, view, worker in zip(scores, views, workers, strict=True)
            ],
        }

    def _forget(self, worker: Worker) -> None:
        """Forgets what was known of a worker that is gone, and of its cache."""
        self.prefixes.forget_worker(worker.slot)
        self.attempts.sessions.forget_worker(worker.slot)
        worker.pins.clear()
        worker.clear_load()

    def _candidates(self, tried: set[Worker]) -> list[Worker]:
        """The available workers, without those tried if there are others."""
        candidates = [w for w in self.workers.all if w.is_available]
        if self.workers.has_roles:
            candidates = [w for w in candidates if w.role != DECODE]
        return [w for w in candidates if w not in tried] or candidates

    def _find_home(
        self, request: PlacementRequest, candidates: list[Worker], held: HeldBySlot, now_s: float
    ) -> tuple[Worker | None, list[WorkerView]]:
        """The worker that the request's session stays on, with views of all workers, of the others
        only in part."""
        home = next((w for w in candidates if w.id == request.home), None)
        if home is None:
            return None, []
        view = self._view(home, held, now_s)
        others = [
            WorkerView(w.id, held[w.slot].expected_tokens, w.total_pending_tokens(now_s))
            for w in candidates
            if w is not home
        ]
        if stays(request, view, others) != "home":
            return None, []
        return home, [view, *others]

    def _has_capacity(
        self, worker: Worker, routing: RoutingRequest, held: HeldBySlot | None = None
    ) -> bool:
        """Whether a worker has capacity for a request; without `held`, for one of no tokens."""
        peers = worker.peer_load
        if worker.in_flight + peers.in_flight >= self.worker_limit:
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
            self.preemption_threshold,
            peers.in_flight,
            peers.pending_tokens,
            routing.tenant,
        )

    def _view(self, worker: Worker, held: HeldBySlot, now_s: float) -> WorkerView:
        return WorkerView(
            worker.id,
            held[worker.slot].expected_tokens,
            worker.total_pending_tokens(now_s),
            worker.decoding + worker.peer_load.decoding,
            worker.recent_prefill.at(now_s),
            self.attempts.sessions.live_tokens(worker.slot),
            worker.warmth(now_s),
        )

    def _placement_request(self, routing: RoutingRequest, held: HeldBySlot) -> PlacementRequest:
        """The request with its session's worker: the remembered one, or the one that holds most
        of the session."""
        slots: Collection[int] = ()
        last_tokens, chain = 0, routing.chain
        home = None if routing.session is None else self.attempts.sessions.home(routing.session)
        if home is not None:
            slots, last_tokens = home[:1], home[1]
        elif chain.session is not None:
            begin = chain.hashes.index(chain.session) + 1
            tokens = {s: h.expected_tokens for s, h in held.items() if h.expected_segments >= begin}
            most = max(tokens.values(), default=0)
            slots = [slot for slot, held_tokens in tokens.items() if held_tokens == most]
        # Slots differ between balancers, so that they are no reason to prefer a worker.
        homes = [worker.id for worker in self.workers.all if worker.slot in slots] if slots else ()
        home_id = chosen_of(routing.prefix, homes) if homes else None
        return PlacementRequest(routing.prompt_tokens, routing.prefix, home_id, last_tokens)
