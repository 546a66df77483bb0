"""Where each request goes, and what is remembered of it: no HTTP, no waiting.

A request is read once (`read`), placed as often as it is tried (`place`), and
each try is a flight, which is told what becomes of it: `first_byte`, then
`arrived` or `broke_off`. In between it counts as its worker's load, and its
prefix is expected there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from radix.in_flight_prefixes import InFlightPrefix, InFlightPrefixes
from radix.index import PrefixIndex
from scheduler.capacity import has_capacity
from scheduler.placement import (
    OtherWorkers,
    Placement,
    PlacementRequest,
    WorkerView,
    place,
    score,
    stays,
)
from scheduler.sessions import Sessions
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempt import Attempt, RoutingRequest
from sgl_ext.balancer.routing.workers import Worker, Workers
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.priority import read_importance
from sgl_ext.requests.segments import Chain, read_chain, with_sorted_tools
from sgl_ext.requests.session import is_final, salt_of, session_key
from sgl_ext.tenants import Tenants

LIMIT_SEGMENTS = 1_000_000
CONFIRM_S = 5.0
SESSION_LIVE_S = 60.0
# An engine that does not say what it holds is believed to hold what it was sent, for so long.
UNCONFIRMED_S = 600.0
# What another balancer sent is expected for so long; when its request ends is not told.
HEARD_S = 30.0
# Behind a shared prefix that is being computed it pays to wait, if it is at least so long.
FOLLOW_TOKENS = 512
_BYTES_PER_TOKEN = 4.0
_CALIBRATE_FROM_TOKENS = 256
_CALIBRATION = 0.05


class _Held(NamedTuple):
    """How much of a chain a worker holds (`confirmed` segments), and is about to hold."""

    tokens: int
    confirmed: int
    expected: int
    expected_tokens: int
    in_flight_prefix: InFlightPrefix | None


_NOTHING = _Held(0, 0, 0, 0, None)


def _saved(home: Worker, others: Collection[Worker], held: Mapping[int, _Held]) -> int:
    """How many tokens of a prompt need not be computed at home that must be elsewhere."""
    most = max(held.get(worker.slot, _NOTHING).expected_tokens for worker in others)
    return held.get(home.slot, _NOTHING).expected_tokens - most


class Router:
    """Places requests on workers. One a process; not for several threads."""

    def __init__(
        self,
        workers: Workers,
        metrics: Metrics,
        worker_limit: int = 1024,
        *,
        sort_tools: bool = False,
        tenants: Tenants | None = None,
        preemption_threshold: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = workers
        self.index = PrefixIndex(LIMIT_SEGMENTS)
        self.expected = InFlightPrefixes(CONFIRM_S)
        self.sessions = Sessions(SESSION_LIVE_S)
        self._metrics = metrics
        self._worker_limit = worker_limit
        self.sort_tools = sort_tools
        self.tenants = Tenants() if tenants is None else tenants
        self._clock = clock
        self._preemption_threshold = preemption_threshold
        self._on_capacity: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._on_take_off: list[Callable[[Attempt], None]] = []
        self._computing: dict[InFlightPrefix | None, Attempt] = {}
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._calibrations = 0
        workers.on_leave(self.forget)

    def read(
        self, path: str, headers: Mapping[str, str], body: Any, size_bytes: int
    ) -> RoutingRequest:
        """What placement needs of a parsed and stripped body. `headers` has lower-case names."""
        document = with_sorted_tools(body) if self.sort_tools else body
        chain = read_chain(of_path(path), document, salt=salt_of(headers))
        session = session_key(headers, body, chain)
        size = chain.ends[-1] if chain.ends else size_bytes
        prefix = chain.hashes[0] if chain.hashes else session or 0
        tenant = self.tenants.asking(headers)
        # What is malformed in it is the engine's to refuse.
        importance = read_importance(headers, body, tenant.max_priority)
        return RoutingRequest(
            chain,
            session,
            prefix,
            int(size / self._bytes_per_token),
            is_final(headers),
            importance.priority,
            importance.output_tokens or 0,
            tenant.name,
        )

    def place(
        self, routing: RoutingRequest, tried: set[Worker], *, waits_for_home: bool = False
    ) -> Attempt | None:
        """Sends the request on its flight, to a worker not tried before if there is one.

        None if no worker may be sent anything now, none has room, or the one that its session
        stays on has none and it `waits_for_home`.
        """
        now_s = self._clock()
        if unconfirmed := self.expected.expire(now_s):
            self._metrics.unconfirmed_prefixes.inc(unconfirmed)
        self.sessions.expire(now_s)
        candidates = self._candidates(tried)
        if not any(self._has_capacity(w, routing) for w in candidates):
            return None
        held = self._held(routing.chain)
        roomy = [w for w in candidates if self._has_capacity(w, routing, held)]
        if not roomy:
            return None
        question = self._question(routing, held)
        home = self._stay(question, candidates, held, now_s)
        if home is not None and home in roomy:
            return self._begin_attempt(routing, home, Placement(home.url, "home"), held, now_s)
        if home is not None and waits_for_home and _saved(home, roomy, held) >= FOLLOW_TOKENS:
            return None
        placement = place(question, [self._view(w, held, now_s) for w in roomy])
        assert placement is not None, "some worker has room"
        if home is not None:
            placement = Placement(placement.worker, "moved")
        worker = next(w for w in roomy if w.url == placement.worker)
        return self._begin_attempt(routing, worker, placement, held, now_s)

    def has_capacity_for(
        self, routing: RoutingRequest, tried: set[Worker], *, at_home: bool = False
    ) -> bool:
        """Whether a worker, or that of its session, has room for a request if it fits its memory.

        The prompt is not looked up for it. If none has room, none has any for a lower priority.
        """
        candidates = self._candidates(tried)
        if at_home and routing.session is not None:
            home = self.sessions.home(routing.session)
            candidates = [w for w in candidates if home and w.slot == home[0]] or candidates
        return any(self._has_capacity(w, routing) for w in candidates)

    def _candidates(self, tried: set[Worker]) -> list[Worker]:
        """The workers that may be sent a request now: those not tried, if there are any."""
        candidates = [w for w in self.workers.all if w.is_available]
        return [w for w in candidates if w not in tried] or candidates

    def _stay(
        self,
        routing: PlacementRequest,
        candidates: list[Worker],
        held: dict[int, _Held],
        now_s: float,
    ) -> Worker | None:
        """The worker of a session that stays, as most do, found without a view of every worker."""
        home, most, least = None, 0, None
        for worker in candidates:
            if worker.url == routing.home:
                home = worker
                continue
            pending = worker.total_pending_tokens(now_s)
            least = pending if least is None or pending < least else least
            if worker.slot in held:
                most = max(most, held[worker.slot].expected_tokens)
        if home is None:
            return None
        view = self._view(home, held, now_s)
        others = OtherWorkers(most, view.pending_tokens if least is None else least)
        return home if stays(routing, view, others) == "home" else None

    def _has_capacity(
        self, worker: Worker, routing: RoutingRequest, held: dict[int, _Held] | None = None
    ) -> bool:
        """Whether a worker has room for a request; without `held`, if it needs no memory."""
        there = worker.peer_load
        if worker.in_flight + there.in_flight >= self._worker_limit:
            return False
        if worker.capacity is None or not routing.runs:
            return True
        tokens = 0
        if held is not None:
            expected = held.get(worker.slot, _NOTHING).expected_tokens
            tokens = max(routing.prompt_tokens - expected, 0) + routing.output_tokens
        return has_capacity(
            worker.capacity,
            worker.running,
            routing.priority,
            tokens,
            self._preemption_threshold,
            there.in_flight,
            there.pending_tokens,
        )

    def any_available(self, besides: Collection[Worker] = ()) -> bool:
        """Whether some worker takes requests, be it full."""
        return any(w.is_available for w in self.workers.all if w not in besides)

    def on_capacity(self, action: Callable[[], None]) -> None:
        """Has `action` called whenever there may be room: a flight has ended, or others say so."""
        self._on_capacity.append(action)

    def on_end(self, action: Callable[[], None]) -> None:
        """Has `action` called whenever a flight ends."""
        self._on_end.append(action)

    def capacity_changed(self) -> None:
        """An engine, or another balancer, has told its load: there may be room now."""
        for act in self._on_capacity:
            act()

    def prefill_done(self, attempt: Attempt) -> None:
        """The worker has computed the prompt; to say so twice changes nothing."""
        if not attempt.decoding:
            self._end_prefill(attempt)
            attempt.decoding = True
            attempt.worker.decoding += 1

    def confirmed(self, worker: Worker) -> None:
        """The worker has said that it holds more. What it computed is done, though an answer
        that does not stream shows no byte of it for long."""
        for attempt in tuple(worker.attempts):
            in_flight_prefix = attempt.in_flight_prefix
            if (
                in_flight_prefix is None
                or in_flight_prefix.computed
                or not in_flight_prefix.segments
            ):
                continue
            if self.index.holds(worker.slot, in_flight_prefix.segments[-1]):
                self.prefill_done(attempt)

    def arrived(self, attempt: Attempt, *, well: bool = True) -> None:
        """The whole answer came; `well` is False if it says that the worker failed."""
        if not well:
            return self.fail(attempt, by_worker=True, answered=True)
        self._end(attempt)
        attempt.worker.breaker.succeeded()
        if attempt.in_flight_prefix is not None:
            confirm_s = None if attempt.worker.publishes else UNCONFIRMED_S
            self.expected.end(attempt.in_flight_prefix, self._clock(), confirm_s)
        self._ended()

    def fail(self, attempt: Attempt, *, by_worker: bool, answered: bool = False) -> None:
        """The answer will not be complete, by the worker's fault or by the client's leave.

        answered: the worker says itself that it failed.
        """
        self._end(attempt)
        if by_worker:
            attempt.worker.breaker.failed(self._clock(), answered=answered)
        if attempt.in_flight_prefix is not None:
            self.expected.drop(attempt.in_flight_prefix)
        self._ended()

    def forget(self, worker: Worker) -> None:
        """The worker is gone, and its cache with it."""
        self.index.clear(worker.slot)
        self.expected.forget_worker(worker.slot)
        self.sessions.forget_worker(worker.slot)
        worker.pins.clear()
        worker.clear_load()

    def views(self, chain: Chain) -> list[tuple[Worker, WorkerView]]:
        """The workers that take requests, each with what it holds of a chain."""
        now_s = self._clock()
        held = self._held(chain)
        takers = [w for w in self.workers.all if w.is_available]
        return [(worker, self._view(worker, held, now_s)) for worker in takers]

    def explain(self, routing: RoutingRequest) -> dict[str, Any]:
        """What each worker would cost this request now, and where it would go. Changes nothing."""
        now_s = self._clock()
        held = self._held(routing.chain)
        views = [self._view(worker, held, now_s) for worker in self.workers.all]
        question = self._question(routing, held)
        is_open = [w.is_available for w in self.workers.all]
        choosable = [view for view, is_in in zip(views, is_open, strict=True) if is_in]
        placement = place(question, choosable)
        scores = score(question, views, is_new=question.home is None)
        return {
            "segments": len(routing.chain.hashes),
            "tools": routing.chain.tools,
            "prompt_tokens": routing.prompt_tokens,
            "session": None if routing.session is None else f"{routing.session:032x}",
            "home": question.home,
            "worker": None if placement is None else placement.worker,
            "reason": "no worker is open" if placement is None else placement.reason,
            "workers": [
                {
                    **cost._asdict(),
                    "open": is_in,
                    "has_room": self._has_capacity(worker, routing, held),
                    "held_tokens": view.held_tokens,
                    "pinned_tokens": worker.pins.tokens_of(routing.chain.hashes),
                    "live_session_tokens": view.session_tokens,
                    "decoding_requests": view.decoding,
                    "warmth": view.warmth,
                }
                for cost, view, is_in, worker in zip(
                    scores, views, is_open, self.workers.all, strict=True
                )
            ],
        }

    def _begin_attempt(
        self,
        routing: RoutingRequest,
        worker: Worker,
        placement: Placement,
        held_where: dict[int, _Held],
        now_s: float,
    ) -> Attempt:
        attempt = Attempt(routing, worker, placement, now_s)
        held = held_where.get(worker.slot, _NOTHING)
        attempt.predicted_tokens = held.tokens
        attempt.expected_tokens = held.expected_tokens
        uncached_tokens = max(routing.prompt_tokens - held.expected_tokens, 0)
        attempt.uncached_tokens = 0 if routing.warms else uncached_tokens
        if not worker.in_flight:
            worker.last_heard_s = now_s
        worker.in_flight += 1
        worker.attempts.add(attempt)
        if routing.runs:
            tokens = attempt.uncached_tokens + routing.output_tokens
            capacity = worker.capacity
            attempt.running_tokens = tokens if capacity is None else capacity.counted(tokens)
            worker.running.add(routing.priority, attempt.running_tokens)
        worker.pending_tokens += attempt.uncached_tokens
        worker.recent_prefill.add(attempt.uncached_tokens, now_s)
        is_computing = held.in_flight_prefix is not None and not held.in_flight_prefix.computed
        # A worker that does not publish shows its progress by a first byte only, maybe late.
        if (
            is_computing
            and worker.publishes
            and not routing.warms
            and held.expected_tokens - held.tokens >= FOLLOW_TOKENS
        ):
            attempt.follows = self._computing.get(held.in_flight_prefix)
        hashes = routing.chain.hashes
        if 2 * len(self.index) > LIMIT_SEGMENTS:
            # Far from its limit the index forgets nothing, and a touch would be for nothing.
            self.index.touch(hashes, held.confirmed)
        if held.expected < len(hashes) and not routing.warms:
            attempt.in_flight_prefix = self.expected.expect(worker.slot, hashes[held.expected :])
            self._computing[attempt.in_flight_prefix] = attempt
        if routing.session is not None:
            if routing.is_final:
                self.sessions.end(routing.session)
            else:
                self.sessions.record(routing.session, worker.slot, routing.prompt_tokens, now_s)
        for act in self._on_take_off:
            act(attempt)
        return attempt

    def _end_prefill(self, attempt: Attempt) -> None:
        attempt.worker.pending_tokens -= attempt.uncached_tokens
        attempt.uncached_tokens = 0
        if attempt.in_flight_prefix is not None:
            attempt.in_flight_prefix.computed = True
            self._computing.pop(attempt.in_flight_prefix, None)
        followers, attempt.followers = attempt.followers, []
        for wake in followers:
            wake()

    def _end(self, attempt: Attempt) -> None:
        self._end_prefill(attempt)
        attempt.worker.in_flight -= 1
        attempt.worker.attempts.discard(attempt)
        if attempt.routing.runs:
            attempt.worker.running.remove(attempt.routing.priority, attempt.running_tokens)
        if attempt.decoding:
            attempt.worker.decoding -= 1
            attempt.decoding = False

    def record_peer_placement(
        self, worker: Worker, session: int | None, segments: Sequence[int], routing: tuple[int, int]
    ) -> None:
        """Another balancer of this node sent a request to `worker`, which will make it hold
        `segments`; `asked` are its prompt's tokens, and how many of them are to compute."""
        now_s = self._clock()
        prompt_tokens, uncached_tokens = routing
        worker.recent_prefill.add(uncached_tokens, now_s)
        if segments:
            in_flight_prefix = self.expected.expect(worker.slot, segments)
            self.expected.end(in_flight_prefix, now_s, HEARD_S)
        if session is not None:
            self.sessions.record(session, worker.slot, prompt_tokens, now_s)

    def on_placed(self, action: Callable[[Attempt], None]) -> None:
        """Has `action` called with every flight as it begins."""
        self._on_take_off.append(action)

    def _ended(self) -> None:
        for act in self._on_end:
            act()
        self.capacity_changed()

    def _held(self, chain: Chain) -> dict[int, _Held]:
        """Of each worker's slot that holds or will hold some of the chain, how much."""
        found: dict[int, _Held] = {}
        for match in self.index.matches(chain.hashes):
            held = _Held(match.tokens, match.depth, match.depth, match.tokens, None)
            mask = match.workers
            while mask:
                low = mask & -mask
                found[low.bit_length() - 1] = held
                mask ^= low
            self._calibrate(chain.ends[match.depth - 1], match.tokens)
        for slot, (depth, in_flight_prefix) in self.expected.deepest(chain.hashes).items():
            held = found.get(slot, _NOTHING)
            if depth > held.confirmed:
                begin = chain.ends[held.confirmed - 1] if held.confirmed else 0
                more = int((chain.ends[depth - 1] - begin) / self._bytes_per_token)
                found[slot] = held._replace(
                    expected=depth,
                    expected_tokens=held.tokens + more,
                    in_flight_prefix=in_flight_prefix,
                )
        return found

    def _view(self, worker: Worker, held: dict[int, _Held], now_s: float) -> WorkerView:
        return WorkerView(
            worker.url,
            held.get(worker.slot, _NOTHING).expected_tokens,
            worker.total_pending_tokens(now_s),
            worker.decoding + worker.peer_load.decoding,
            worker.recent_prefill.at(now_s),
            self.sessions.live_tokens(worker.slot),
            worker.warmth(now_s),
        )

    def _question(self, routing: RoutingRequest, held: dict[int, _Held]) -> PlacementRequest:
        """The request with its session's worker: as remembered, or else as the caches show."""
        slot, last_tokens = None, 0
        seen = None if routing.session is None else self.sessions.home(routing.session)
        if seen is not None:
            slot, last_tokens = seen
        elif routing.chain.session is not None:
            begun = routing.chain.hashes.index(routing.chain.session) + 1
            holders = [(h.expected_tokens, s) for s, h in held.items() if h.expected >= begun]
            slot = max(holders, default=(0, None))[1]
        worker = next((w for w in self.workers.all if w.slot == slot), None)
        home = None if worker is None else worker.url
        return PlacementRequest(routing.prompt_tokens, routing.prefix, home, last_tokens)

    def _calibrate(self, size_bytes: int, tokens: int) -> None:
        """Learns how many bytes of a request make a token of this model, fast at first."""
        if tokens >= _CALIBRATE_FROM_TOKENS:
            ratio = min(max(size_bytes / tokens, 1.0), 16.0)
            self._calibrations += 1
            share = max(_CALIBRATION, 1 / self._calibrations)
            self._bytes_per_token += share * (ratio - self._bytes_per_token)
