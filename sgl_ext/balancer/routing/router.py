"""Where each request goes: reads it for routing, and places it on a worker. No HTTP, no waiting.

    read --> place --> an attempt, whose life is in `attempts`

`read` runs once for a request, `place` once for each attempt.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from math import inf
from operator import or_
from typing import Any, NamedTuple

from scheduler.capacity import Capacity, exceeds_part, has_capacity, is_at_hand
from scheduler.placement import (
    Placement,
    PlacementRequest,
    WorkerView,
    chosen_of,
    place,
    rendezvous,
    score_all,
    stays,
)
from scheduler.sessions import Sessions
from scheduler.shortlist import SMALL_FLEET, Shortlist, bits_of
from scheduler.speeds import EVEN
from scheduler.suspects import Suspects
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import FOLLOW_TOKENS, Attempts
from sgl_ext.balancer.routing.prefixes import HeldBySlot, HeldPrefix, Prefixes
from sgl_ext.balancer.routing.routing_request import Prompt, RoutingRequest
from sgl_ext.balancer.routing.worker import DECODE, Attempt, ServedRequest, Worker
from sgl_ext.balancer.routing.workers import WorkerSet, can_answer
from sgl_ext.reading.client import shown_name
from sgl_ext.reading.segments import Chain
from sgl_ext.tenants import Tenants
from sgl_ext.wire.headers import TENANT_HEADER

# What fades without a report, such as recent work, is read again within this time, if so many
# requests come that none has to read more than a few workers again.
REREAD_S = 1.0
_MOST_REREAD = 16
_NO_PREFIX, _NOTHING = HeldBySlot(), HeldPrefix()
PASS_S = 1.0
"""What has expired is forgotten this much later, so that not every request has to look for it."""


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
        workers: WorkerSet,
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

    def __init__(self, workers: WorkerSet, sessions: Sessions) -> None:
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

    def view(self, worker: Worker, held: HeldPrefix, now_s: float) -> WorkerView:
        """held: what the worker holds of the prompt."""
        return worker.view(held, self._sessions.tokens[worker.slot], now_s)

    def load_changed(self, worker: Worker, now_s: float) -> None:
        """Call it when the load of a worker has changed."""
        if self.is_large and worker.role != DECODE:
            view = self.view(worker, _NOTHING, now_s)
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


# Of more workers, a session that stays home lists its own and those that hold most of the prompt.
MOST_LISTED = 8
_NO_VIEW = WorkerView("")


class Lookup(NamedTuple):
    """What is known of a request before it is placed.

    known: the worker of its session. home: the same if the session stays there, and its view.
    """

    request: PlacementRequest
    held: HeldBySlot
    known: Worker | None
    home: Worker | None
    view: WorkerView


class Homes:
    """Finds homes. Sessions are remembered in `attempts`."""

    def __init__(
        self, workers: WorkerSet, attempts: Attempts, fleet: Fleet, prefixes: Prefixes
    ) -> None:
        self._workers = workers
        self._attempts = attempts
        self._fleet = fleet
        self._prefixes = prefixes

    def look_up(
        self, routing: RoutingRequest, candidates: Candidates, now_s: float, *, learns: bool
    ) -> Lookup:
        """The session's worker is the remembered one, or the one that holds most of the session.
        While little waits there, the time does not grow with the number of workers. learns:
        whether the prompt's size is learned from."""
        session, last_tokens = routing.session, 0
        last = None if session is None else self._attempts.sessions.home(session)
        known = None
        if last is not None:
            slot, last_tokens = last
            known = self._workers.at_slot(slot)
            if known is not None and known.is_gone:
                known = self._workers.find(known.id)
        home = known if known is not None and known in candidates else None
        held = self._prefixes.lookup(routing.chain, routing.others)
        if learns:
            self._prefixes.learn_size(routing.chain, held)
        if last is None and routing.chain.session is not None:
            known = self._holder(routing, held)
            home = known if known is not None and known in candidates else None
        answer_tokens = self._attempts.speeds.answer_tokens(routing.output_tokens)
        home_id = None if known is None else known.id
        request = PlacementRequest(
            routing.prompt_tokens, routing.prefix, home_id, last_tokens, answer_tokens
        )
        if home is None:
            return Lookup(request, held, known, None, _NO_VIEW)
        there, at = held.of(home), self._workers.at_slot
        most: float
        if self._workers.has_tiers:
            others = [w for w in candidates.all if w is not home]
            views = (self._fleet.view(w, held.of(w), now_s) for w in others)
            most = max((other.saved for other in views), default=0)
        else:
            most = held.most_tokens(home.slot, lambda slot: at(slot) in candidates)
        view = home.view(there, self._attempts.sessions.tokens[home.slot], now_s)
        reason = stays(request, view, most)
        if reason == "moved":
            found = self._fleet.compared(candidates, held, home, lambda w: w is not home, now_s)
            waits = (w.weights.prefill * w.total_pending_tokens(now_s) for w in found)
            reason = stays(request, view, most, min(waits, default=inf))
        return Lookup(request, held, known, home if reason == "home" else None, view)

    def _holder(self, routing: RoutingRequest, held: HeldBySlot) -> Worker | None:
        """The worker that holds most of a session that is not remembered."""
        chain = routing.chain
        assert chain.session is not None, "it has one"
        begin = chain.hashes.index(chain.session) + 1
        tokens = dict(held.holders(begin))
        most = max(tokens.values(), default=0)
        slots = [slot for slot, held_tokens in tokens.items() if held_tokens == most]
        # Slots differ between balancers, so that they are no reason to prefer a worker.
        homes = [worker.id for slot in slots if (worker := self._workers.at_slot(slot))]
        return self._workers.find(chosen_of(routing.prefix, homes)) if homes else None

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


@dataclass(eq=False)
class Router:
    """Places requests on the workers of one model. Not thread-safe.

    worker_limit: how many requests may be in flight at a worker in any case.
    lists_others: whether in a large fleet, too, the attempt of a session that stays at its worker
        lists others.
    hashes_sessions: whether sessions are named by hashes.
    on_capacity: called whenever a worker may have more capacity.
    """

    workers: WorkerSet
    metrics: Metrics
    worker_limit: int = 1024
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
        self.homes = Homes(self.workers, self.attempts, self.fleet, self.prefixes)
        sessions, tables = self.attempts.sessions, self.metrics.tables
        self.prefixes.add_tables(tables)
        tables.add("sessions", sessions.__len__, lambda: sessions.limit)
        self.on_capacity: list[Callable[[], None]] = []
        self._due_s = -inf
        self.attempts.on_end.append(self.capacity_changed)
        self.workers.on_leave.append(self.forget)

    def routing_of(
        self, prompt: Prompt, headers: Mapping[str, str], *, warms: bool = False
    ) -> RoutingRequest:
        """How to route a request with this prompt. `headers` has lower-case names."""
        tenant, name = headers.get(TENANT_HEADER, ""), None
        if prompt.stated:
            name = shown_name(prompt.stated, tenant, hashes=self.hashes_sessions)
        elif prompt.session is not None:
            name = f"{prompt.session:032x}"
        return RoutingRequest(
            prompt.chain,
            prompt.session,
            prompt.prefix,
            self.prefixes.estimate_tokens(prompt.size_bytes),
            prompt.is_final,
            prompt.importance.priority,
            prompt.importance.output_tokens or 0,
            tenant,
            runs=not warms,
            warms=warms,
            session_name=name,
            others=prompt.others,
            prompts=1 + len(prompt.others),
            due_s=prompt.importance.due_s,
            agent=prompt.agent,
        )

    def place(
        self,
        routing: RoutingRequest,
        tried: set[Worker],
        served: ServedRequest | None = None,
        *,
        waits_for_home: bool = False,
    ) -> Attempt | None:
        """Begins an attempt on a worker, one that is not in `tried` if there is one, for the
        request that it serves.

        None if no worker has capacity, or if the worker that its session stays on has none and
        the request `waits_for_home`.
        """
        now_s = self.clock()
        if now_s >= self._due_s:
            self.pass_time(now_s)
        candidates = self.candidates(routing, tried)
        request, held, known, home, view = self.homes.look_up(
            routing, candidates, now_s, learns=True
        )
        has_capacity = partial(candidates.has_capacity, held=held)
        if home is not None and has_capacity(home):
            views, count = [view], len(self.workers.all)
            if count > 1 and (self.lists_others or count <= SMALL_FLEET):
                views = self.homes.views_beside(home, view, candidates, held, now_s)
            return self._begin(routing, home, "home", held, views, candidates, served)
        open_workers = self.fleet.compared(candidates, held, known, has_capacity, now_s)
        if not open_workers:
            if home is None:
                return None
            return self._beyond(routing, home, view, held, candidates, served)
        views = [self.fleet.view(w, held.of(w), now_s) for w in open_workers]
        if waits_for_home and home is not None:
            more_saved = view.saved - max(other.saved for other in views)
            if more_saved >= FOLLOW_TOKENS:
                return None
        moves = home is not None
        chosen = place(request, views, self.fleet.mean_sessions, moves=moves)
        assert chosen is not None, "some worker has capacity"
        worker = next(w for w in open_workers if w.id == chosen.worker)
        return self._begin(routing, worker, chosen.reason, held, views, candidates, served)

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

    def pass_time(self, now_s: float) -> None:
        """Forgets what has expired, and takes over what was learned of the workers' speeds. A
        placement calls it if that is PASS_S ago."""
        self._due_s = now_s + PASS_S
        if unconfirmed := self.prefixes.in_flight.expire(now_s):
            self.metrics.unconfirmed_prefixes.inc(unconfirmed)
        self.attempts.sessions.expire(now_s)
        speeds = self.attempts.speeds
        for slot in speeds.refresh(now_s):
            if (worker := self.workers.at_slot(slot)) is not None:
                worker.weights = speeds.weights(slot)
                self.fleet.load_changed(worker, now_s)

    def place_at_hand(
        self, routing: RoutingRequest, tried: set[Worker], served: ServedRequest | None = None
    ) -> Attempt | None:
        """Begins an attempt on the worker that its session stays on, beyond the worker's capacity.
        None if the prompt is not at hand there, or if too many were sent beyond it."""
        now_s = self.clock()
        candidates = self.candidates(routing, tried)
        found = self.homes.look_up(routing, candidates, now_s, learns=False)
        if found.home is None:
            return None
        return self._beyond(routing, found.home, found.view, found.held, candidates, served)

    def _beyond(
        self,
        routing: RoutingRequest,
        home: Worker,
        view: WorkerView,
        held: HeldBySlot,
        candidates: Candidates,
        served: ServedRequest | None,
    ) -> Attempt | None:
        there = held[home.slot]
        tokens = self.prefixes.prompt_tokens(routing.chain, there, routing.prompt_tokens)
        if not candidates.may_go_beyond(home, tokens, there.tokens):
            return None
        return self._begin(routing, home, "home", held, [view], candidates, served, is_beyond=True)

    def _begin(
        self,
        routing: RoutingRequest,
        worker: Worker,
        reason: str,
        held: HeldBySlot,
        views: list[WorkerView],
        candidates: Candidates,
        served: ServedRequest | None,
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
            served,
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
        served = attempt.served
        self.attempts.fail(attempt, by_worker=True)
        held = self.prefixes.lookup(attempt.routing.chain).of(worker)
        placement = Placement(worker.id, "moved")
        begun = self.attempts.begin(attempt.routing, worker, placement, held, served=served)
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
        candidates = self.candidates(routing, tried)
        held = self.prefixes.lookup(routing.chain, routing.others)
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
        return [(w, self.fleet.view(w, held.of(w), now_s)) for w in available]

    def forget(self, worker: Worker) -> None:
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


def explain(router: Router, routing: RoutingRequest) -> dict[str, Any]:
    """What this request would cost on each worker, and where it would go. Changes nothing."""
    now_s = router.clock()
    candidates = router.candidates(routing, set())
    request, held, home, *_ = router.homes.look_up(routing, candidates, now_s, learns=False)
    workers = [worker for worker in router.workers.all if worker.role != DECODE]
    views = {w: router.fleet.view(w, held.of(w), now_s) for w in workers}
    compared = router.fleet.compared(candidates, held, home, lambda _: True, now_s)
    mean_sessions = router.fleet.mean_sessions
    placement = place(request, [views[w] for w in compared], mean_sessions)
    scores = score_all(request, [*views.values()], mean_sessions, is_new=request.home is None)
    return {
        "segments": len(routing.chain.hashes),
        "tools": routing.chain.tools,
        "prompt_tokens": routing.prompt_tokens,
        "session": routing.session_name,
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
