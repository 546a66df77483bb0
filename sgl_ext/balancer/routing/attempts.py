"""Attempts to serve requests on workers, and the load and the prefixes that they bring there.

    begin --> prefill_done --> succeed or fail

`prefill_done` may be left out or repeated. From `begin` to the end an attempt counts as load of its
worker, and its prefix is expected there. Attempts that follow it wait until its prefill is done.
"""

from collections.abc import Callable, Sequence

from radix.in_flight_prefixes import InFlightPrefix
from scheduler.placement import Placement, WorkerView
from scheduler.sessions import Sessions
from scheduler.speeds import Speeds
from scheduler.working_set import WorkingSet
from sgl_ext.balancer.routing.prefixes import HeldPrefix, Prefixes
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, ServedRequest, Worker, unknown

SESSION_LIVE_S = 60.0
# How long an engine has to report a prefix that it has computed.
CONFIRM_S = 5.0
# An engine without prefix events is assumed to hold what it was sent for this long.
UNCONFIRMED_S = 600.0
# Peers do not report when a request ends, so its prefix is expected for this long.
PEER_PREFIX_S = 30.0
# Waiting for a shared prefix that is being computed pays from this length on.
FOLLOW_TOKENS = 512


class Attempts:
    """The attempts of one balancer process.

    working_set: what agents use; None while it is not counted.
    on_begin: called with every attempt that begins.
    on_end: called after every attempt that ends.
    """

    def __init__(self, prefixes: Prefixes, clock: Callable[[], float]) -> None:
        self.sessions = Sessions(SESSION_LIVE_S)
        self.speeds = Speeds()
        self.working_set: WorkingSet | None = None
        self._prefixes = prefixes
        self._clock = clock
        self._computing: dict[InFlightPrefix | None, Attempt] = {}
        self.on_begin: list[Callable[[Attempt], None]] = []
        self.on_end: list[Callable[[], None]] = []

    def begin(
        self,
        routing: RoutingRequest,
        worker: Worker,
        placement: Placement,
        held: HeldPrefix,
        considered: Sequence[WorkerView] = (),
        decoder: Worker | None = None,
        served: ServedRequest | None = None,
        *,
        is_beyond: bool = False,
        held_at: Callable[[str], int | None] = unknown,
    ) -> Attempt:
        """Begins an attempt on a worker, which holds `held` of the prompt."""
        now_s = self._clock()
        slower_tokens = held.host_tokens + held.shared_tokens
        attempt = Attempt(
            routing,
            worker,
            decoder or worker,
            placement,
            considered,
            held_at,
            held.tokens + slower_tokens,
            held.expected_tokens + slower_tokens,
            began_s=now_s,
            served=served,
            decoder=decoder,
            is_beyond=is_beyond,
        )
        capacity = worker.capacity
        uncached_tokens = max(routing.prompt_tokens - held.expected_tokens, 0)
        pending_tokens = uncached_tokens
        if slower_tokens:  # they need memory, too, but less time
            loaded = worker.load_share * held.host_tokens
            loaded += worker.shared_share * held.shared_tokens
            pending_tokens = max(uncached_tokens - slower_tokens, 0) + int(loaded)
        if not routing.warms:
            # Estimated by its bytes, a prompt may be longer than any that the worker takes.
            longest = pending_tokens if capacity is None else capacity.context
            attempt.uncached_tokens = min(pending_tokens, longest)
            if held.in_flight is not None:
                attempt.follows = self._followed(worker, held, held.in_flight)
        tokens = self._prefixes.prompt_tokens(routing.chain, held, routing.prompt_tokens)
        prefix = self._prefixes.begin(routing.chain, worker.slot, held, expects=not routing.warms)
        if prefix is not None:
            attempt.in_flight_prefix = prefix
            self._computing[prefix] = attempt
        # One that waits for a prefix, or for kernels of an engine that has just come, is slow.
        if routing.runs and attempt.follows is None and worker.warmth(now_s) == 1.0:
            attempt.work_tokens = worker.total_pending_tokens(now_s) + attempt.uncached_tokens
        pending_tokens = attempt.uncached_tokens
        attempt.running_tokens = worker.enter(attempt, uncached_tokens, now_s, pending_tokens)
        if decoder is not None:
            attempt.decoder_tokens = decoder.enter(attempt, routing.prompt_tokens, now_s)
        if routing.session is not None:
            if routing.is_final:
                self.sessions.end(routing.session)
            else:
                self.sessions.record(routing.session, worker.slot, routing.prompt_tokens, now_s)
            if routing.runs and routing.agent is not None and self.working_set is not None:
                self.working_set.begin(
                    routing.agent,
                    routing.tenant,
                    worker.slot,
                    # A size beyond the whole memory counts as 0: it is wrong.
                    tokens if tokens <= worker.pool_tokens else 0,
                    attempt.expected_tokens,
                    now_s,
                    routing.priority,
                    worker.refill_s,
                )
        for action in self.on_begin:
            action(attempt)
        return attempt

    def _followed(self, worker: Worker, held: HeldPrefix, prefix: InFlightPrefix) -> Attempt | None:
        """The attempt whose prefix is worth waiting for."""
        # Without events only the first byte shows progress, and it may come late.
        if prefix.computed or not worker.publishes:
            return None
        if held.expected_tokens - held.tokens < FOLLOW_TOKENS:
            return None
        return self._computing.get(prefix)

    def sent(self, attempt: Attempt) -> None:
        """The request is sent to the worker."""
        attempt.sent_s = self._clock()

    def prefill_done(self, attempt: Attempt) -> None:
        """The worker has computed the prompt. A second call changes nothing."""
        if not attempt.decoding:
            self._end_prefill(attempt)
            attempt.first_byte_s = now_s = self._clock()
            attempt.decoding = True
            attempt.answerer.begins_decoding()
            took_s = now_s - attempt.began_s
            self.speeds.prefilled(attempt.worker.slot, attempt.work_tokens, took_s, now_s)

    def confirm(self, worker: Worker) -> None:
        """Ends the prefill of the attempts whose prefix the worker has reported. The first byte
        of an answer that does not stream comes much later."""
        for attempt in tuple(worker.attempts):
            prefix = attempt.in_flight_prefix
            if prefix is None or prefix.computed or not prefix.segments:
                continue
            if self._prefixes.index.holds(worker.slot, prefix.segments[-1]):
                self.prefill_done(attempt)

    def succeed(self, attempt: Attempt, output_tokens: int = 0) -> None:
        """The whole answer came, and it is no failure of the worker. output_tokens: its length, 0
        if it is unknown."""
        now_s, has_decoded = self._clock(), attempt.decoding
        self._end(attempt, now_s, now_s if attempt.routing.runs else None)
        if has_decoded:
            tokens, took_s = output_tokens - 1, now_s - attempt.first_byte_s
            self.speeds.decoded(attempt.answerer.slot, tokens, took_s, now_s)
        if attempt.in_flight_prefix is not None:
            confirm_s = CONFIRM_S if attempt.worker.publishes else UNCONFIRMED_S
            self._prefixes.in_flight.end(attempt.in_flight_prefix, now_s + confirm_s)
        attempt.worker.breaker.succeeded()
        if attempt.decoder is not None:
            attempt.decoder.breaker.succeeded()
        for action in self.on_end:
            action()

    def fail(self, attempt: Attempt, *, by_worker: bool, answered: bool = False) -> None:
        """The worker failed, with an error response (`answered`) or without, or the client
        disconnected."""
        now_s = self._clock()
        if by_worker:
            attempt.answerer.breaker.failed(now_s, answered=answered)
        if attempt.routing.runs and attempt.sent_s is not None and not answered:
            attempt.answerer.left(attempt.uncached_tokens)
        if attempt.in_flight_prefix is not None:
            self._prefixes.in_flight.drop(attempt.in_flight_prefix)
        self._end(attempt, now_s)
        for action in self.on_end:
            action()

    def _end_prefill(self, attempt: Attempt) -> None:
        attempt.worker.ends_prefill(attempt.uncached_tokens)
        attempt.uncached_tokens = 0
        if attempt.in_flight_prefix is not None:
            attempt.in_flight_prefix.computed = True
            self._computing.pop(attempt.in_flight_prefix, None)
        followers, attempt.followers = attempt.followers, []
        for resume in followers:
            resume()
        if attempt.decoder is not None and attempt in attempt.worker.attempts:
            # The prefill engine is done with it, and may have capacity for another.
            attempt.worker.leave(attempt, attempt.running_tokens)
            for action in self.on_end:
                action()

    def _end(self, attempt: Attempt, now_s: float, heard_s: float | None = None) -> None:
        """heard_s: as of `Worker.leave`."""
        self._end_prefill(attempt)
        routing, working_set, agent = attempt.routing, self.working_set, attempt.routing.agent
        if working_set is not None and agent is not None and routing.runs:
            refill_s = attempt.worker.refill_s
            working_set.end(agent, now_s, refill_s, is_last=routing.is_final)
        # Else a request and its attempt keep each other until the garbage collector finds them.
        attempt.served = None
        tokens = attempt.running_tokens if attempt.decoder is None else attempt.decoder_tokens
        attempt.answerer.leave(attempt, tokens, heard_s)
        attempt.decoding = False

    def record_of_peer(
        self,
        worker: Worker,
        session: int | None,
        segments: Sequence[int],
        prompt_tokens: int,
        uncached_tokens: int,
        tenant: str = "",
        priority: int = 0,
        agent: int | None = None,
    ) -> None:
        """Records a peer's attempt, after which `worker` will hold `segments`. When it ends is not
        known: its agent's lease begins now."""
        now_s = self._clock()
        worker.recent_prefill.add(uncached_tokens, now_s)
        if segments:
            prefix = self._prefixes.in_flight.expect(worker.slot, segments)
            self._prefixes.in_flight.end(prefix, now_s + PEER_PREFIX_S)
        if session is not None:
            self.sessions.record(session, worker.slot, prompt_tokens, now_s)
            held_tokens = max(prompt_tokens - uncached_tokens, 0)
            agent = session if agent is None else agent
            if self.working_set is not None:
                slot, refill_s = worker.slot, worker.refill_s
                tokens = prompt_tokens if prompt_tokens <= worker.pool_tokens else 0
                self.working_set.begin(
                    agent, tenant, slot, tokens, held_tokens, now_s, priority, refill_s
                )
                self.working_set.end(agent, now_s, refill_s)
