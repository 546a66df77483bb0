"""One engine as the balancer sees it: its state, its load, its capacity, and the attempts at it.

Of an engine with data parallelism each rank is a worker, with a cache, a load and a capacity of its
own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from radix.in_flight_prefixes import InFlightPrefix
from scheduler.agent_admission import PrefillPace, pool_tokens
from scheduler.averages import DecayingSum
from scheduler.breaker import Breaker, State
from scheduler.capacity import Capacity, InFlight
from scheduler.placement import LOAD_SHARE, RECENT_S, SHARED_SHARE, Placement, WorkerView
from scheduler.silence import stalled_after_s
from scheduler.speeds import EVEN
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.membership.member import Member
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.protocols.models import NOT_STATED
from sgl_ext.wire.peers import Load

STATES = (
    "ready",
    "draining",
    "drained",
    "ended",
    "breaker open",
    "hung",
    "stalled",
    "secret refused",
    "starting",
    "unreachable",
)
"""What an engine can be to a balancer. It gets new requests in the first state alone."""
PREFILL, DECODE = "prefill", "decode"
SLOW_START_S = 20.0
SETTLED_S = 0.5


def rank_id(engine: str, rank: int) -> str:
    """The id of a rank of an engine."""
    return f"{engine}#{rank}" if rank else engine


def unknown(worker: str) -> int | None:
    """What workers hold, where that is unknown."""
    return None


class Held(Protocol):
    """What a worker holds of a prompt (`HeldPrefix`)."""

    @property
    def expected_tokens(self) -> int: ...
    @property
    def host_tokens(self) -> int: ...
    @property
    def shared_tokens(self) -> int: ...


class ServedRequest(Protocol):
    """The request that an attempt serves."""

    def abandon(self, reason: str) -> None:
        """The worker will not answer."""
        ...


class Attempt(msgspec.Struct, eq=False):
    """One attempt to serve a request on one worker.

    answerer: the worker that answers: `worker`, or its decoder.
    decoder: the decode engine that answers, if `worker` is a prefill engine.
    is_beyond: whether it was sent beyond the worker's capacity.
    considered: workers that it could have gone to, as they were: all, or of many those that were
        compared. For a session that stays on its worker that one and those that hold most; in a
        large fleet that one alone, unless the router lists others.
    held_at: the tokens that another worker, by its id, was expected to hold of the prompt; None if
        it could not have gone there.
    predicted_tokens: prompt tokens that the worker held in any tier when the attempt began.
    expected_tokens: the same, with those that it was about to hold.
    uncached_tokens: prompt tokens that the worker still has to compute for it; those that it loads
        count with what loading costs.
    began_s: when it began. sent_s: when its request was sent; None before that.
    first_byte_s: when its prompt was computed; 0 before that.
    work_tokens: what the worker had to compute for its first byte; 0 if that shows no speed.
    running_tokens: what the attempt counts with in the worker's `running`. decoder_tokens: the same
        in that of the decoder, which holds no prefix.
    follows: the attempt that computes a prefix this one waits for; `followers` wait for this one.
    served: the request, while the attempt runs: it learns if the attempt is abandoned.
    """

    routing: RoutingRequest
    worker: "Worker"
    answerer: "Worker"
    placement: Placement
    considered: Sequence[WorkerView] = ()
    held_at: Callable[[str], int | None] = unknown
    predicted_tokens: int = 0
    expected_tokens: int = 0
    uncached_tokens: int = 0
    began_s: float = 0.0
    sent_s: float | None = None
    first_byte_s: float = 0.0
    work_tokens: int = 0
    running_tokens: int = 0
    decoder_tokens: int = 0
    decoding: bool = False
    in_flight_prefix: InFlightPrefix | None = None
    follows: "Attempt | None" = None
    followers: list[Callable[[], None]] = []
    served: ServedRequest | None = None
    decoder: "Worker | None" = None
    is_beyond: bool = False

    def abandon(self, reason: str) -> None:
        """The worker will not answer."""
        if self.served is not None:
            self.served.abandon(reason)

    def waits_for_prefix(self, resume: Callable[[], None]) -> bool:
        """Whether the prefix that it follows is still being computed. Then `resume` is called when
        it is, or when the attempt that computes it has ended."""
        followed = self.follows
        if followed is None or followed.in_flight_prefix is None:
            return False
        if followed.in_flight_prefix.computed:
            return False
        followed.followers.append(resume)
        return True


class Worker:
    """One engine, or one rank of it. It is not ready until a probe succeeds.

    member: what its source says of it. id: its identity, also among balancers and in metrics.
    rank: its data-parallel rank. The id of rank 0 is that of the engine, that of rank 1 `ID#1`.
    has_ranks: whether its engine has several.
    role: PREFILL or DECODE, or "" for an engine that does both.
    bootstrap: where decode engines get the KV of a prefill engine, `HOST PORT`.
    source: the name of its source.
    model: the name of its pool (`models`). stated: the model that it says it serves.
    models_asked_s: when the balancer requested that.
    cause: why it was not ready at last; "" if it was from the start.
    draining: it gets no new requests. is_gone: it is also removed after its last one; one that
        the admin API has drained stays.
    is_expected: it gets no new requests now, and requests that find no other worker wait for it.
    slot: its bit in the prefix index, reused after the worker has left.
    host_slot: that of what its host keeps; None without a host tier.
    machine, shared_slot: the one whose shared tier it reads, and that tier's bit; "" and None.
    has_tiers: whether it can load tokens from either.
    load_share, shared_share: what a token costs that it loads from its host or from the shared
        tier, as a share of one that it computes.
    pending_tokens: what it still has to prefill of this balancer's requests.
    running: those requests that its scheduler runs, and their tokens, by priority.
    attempts: the attempts in flight there.
    capacity: what it reports that it can run; None without a report.
    report: the load that it last reported, empty without a report.
    pace: of its prefill, as it reports it.
    pool_tokens: what it can keep, tokens of its host at what loading them saves; 0 if it does not
        report them. refill_s: how long it takes to compute all of that; 0 if that is not known.
    caches_off: the caches of its HTTP process that turned themselves off.
    degraded: features of SGLang with which the extension does less in this engine.
    peer_load: the load that the node's other balancer processes put on it.
    weights: what its work costs, as learned from requests.
    recent_prefill: tokens that it was given to prefill in the last seconds.
    publishes: whether it says that it publishes the prefixes that it holds.
    last_heard_s: when its scheduler last showed life, or got its first work after being idle.
    unready_s: when it had last shown life, as it became unready at last; None if it never did.
    is_owing: a request left it without an answer, and it has shown no life since.
    left_tokens: the most that it had to compute for one of those.
    refuses_secret: its engine secret is another than this balancer's; it gets no requests.
    is_stalled: it has work and shows no life for a while; it gets no requests until it does.
    is_hung: it accepts connections, but does nothing; it gets no requests.
    hung_s: since when it hangs, if it was not stopped from outside; None otherwise.
    is_busy: it has work and sends no event for long, and has just started, or shows that it works.
    worked_s: when it last showed that.
    is_reachable: whether it answered the last probe, in whatever way.
    silent_probes: how many probes in a row it has left without an answer.
    settings_number: the version of reloaded settings that it has; None if it has none of ours.
    settings_fault: why it does not get a newer one, if it does not; "" otherwise.
    recovered_s: when it joined or came back; None if it was there from the start.
    was_ready: whether it has ever been ready.
    """

    def __init__(self, member: Member, slot: int, source: str = "", rank: int = 0) -> None:
        self.member = member
        self.id = rank_id(member.id, rank)
        self.rank = rank
        self.has_ranks = rank > 0
        self.role = ""
        self.bootstrap = ""
        self.url = member.url
        self.source = source
        self.model = ""
        self.stated = NOT_STATED
        self.models_asked_s = float("-inf")
        self.slot = slot
        self.host_slot: int | None = None
        self.machine = ""
        self.shared_slot: int | None = None
        self.has_tiers = False
        self.load_share = LOAD_SHARE
        self.shared_share = SHARED_SHARE
        self.ready = False
        self.was_ready = False
        self.cause = ""
        self.draining = False
        self.is_gone = False
        self.is_expected = False
        self.breaker = Breaker()
        self.in_flight = 0
        self.decoding = 0
        self.pending_tokens = 0
        self.running = InFlight()
        self.attempts: set[Attempt] = set()
        self.capacity: Capacity | None = None
        self.report: Mapping[str, Any] = {}
        self.pace = PrefillPace()
        self.pool_tokens = 0.0
        self.refill_s = 0.0
        self.caches_off: list[str] = []
        self.degraded: list[str] = []
        self.peer_load = Load()
        self.weights = EVEN
        self.recent_prefill = DecayingSum(RECENT_S)
        self.pins = PinMirror()
        self.pinned_tokens = 0
        self.publishes = False
        self.refuses_secret = False
        self.is_stalled = False
        self.is_hung = False
        self.hung_s: float | None = None
        self.is_busy = False
        self.worked_s = 0.0
        self.silent_probes = 0
        self.is_reachable = False
        self.settings_number: int | None = None
        self.settings_fault = ""
        self.last_heard_s = 0.0
        self.unready_s: float | None = None
        self.is_owing = False
        self.left_tokens = 0
        self.recovered_s: float | None = None
        self._correction = _NO_CORRECTION

    @property
    def is_available(self) -> bool:
        """Whether it may be sent a request, if it has capacity."""
        is_up = self.ready and not self.draining and not self.is_hung and not self.is_stalled
        return is_up and self.breaker.state is not State.OPEN

    @property
    def state(self) -> str:
        """Its state, one of STATES."""
        if self.draining:
            state = self.member.state
            if state == "ended" and not self.is_gone:
                return "ended"
            is_busy = self.in_flight or self.peer_load.in_flight
            return "drained" if state == "drained" and not is_busy else "draining"
        if self.is_hung:
            return "hung"
        if self.refuses_secret:
            return "secret refused"
        if not self.ready:
            return "starting" if self.is_reachable else "unreachable"
        if self.is_stalled:
            return "stalled"
        return "ready" if self.breaker.takes_requests else "breaker open"

    @property
    def fault(self) -> str:
        """Why it cannot be used, if that is not simply that it does not answer."""
        if self.refuses_secret:
            return "it refuses the engine-secret of this balancer"
        if self.is_hung:
            return "it hangs"
        return "its scheduler stands still" if self.is_stalled else ""

    @property
    def load(self) -> Load:
        """The load that this process puts on it."""
        return Load(self.in_flight, self.decoding, self.pending_tokens)

    def set_tiers(self, host_slot: int | None, machine: str, shared_slot: int | None) -> None:
        """Takes over the slots of its slower tiers, and the machine of the shared one."""
        self.host_slot, self.machine, self.shared_slot = host_slot, machine, shared_slot
        self.has_tiers = host_slot is not None or shared_slot is not None

    def set_role(self, stated: str) -> None:
        """Takes over the role that its engine states: `prefill PORT`, `decode` or nothing."""
        self.role, _, port = stated.partition(" ")
        self.bootstrap = f"{urlsplit(self.url).hostname} {port}" if self.role == PREFILL else ""

    @property
    def unpublished(self) -> str:
        """What it means that it publishes no prefixes; "" if it does, or needs not."""
        if self.publishes or self.role == DECODE:
            return ""
        return "publishes no prefixes: it is routed to by what this balancer sent there"

    def heard(self, now_s: float) -> None:
        """Its scheduler has shown life."""
        self.last_heard_s = now_s
        self.is_owing = self.is_stalled = False
        self.left_tokens = 0

    def enter(
        self, attempt: Attempt, uncached_tokens: int, now_s: float, pending_tokens: int = 0
    ) -> int:
        """It gets the request of an attempt, and so many tokens more to prefill; returns the tokens
        that the request counts with. If it had nothing to do, its silence begins now."""
        if not self.in_flight and not self.is_owing:
            self.last_heard_s = now_s
        self.in_flight += 1
        self.attempts.add(attempt)
        self.pending_tokens += pending_tokens
        self.recent_prefill.add(pending_tokens, now_s)
        routing, capacity = attempt.routing, self.capacity
        if not routing.runs:
            return 0
        if attempt.is_beyond:
            self.running.beyond += 1
            return 0
        tokens = uncached_tokens + routing.output_tokens
        if capacity is not None:
            tokens = capacity.needed(routing.prompt_tokens, uncached_tokens, routing.output_tokens)
        self.running.add(routing.priority, tokens, routing.tenant, routing.prompts)
        return tokens

    def leave(self, attempt: Attempt, tokens: int, heard_s: float | None = None) -> None:
        """An attempt has ended. tokens: as of `enter`. heard_s: when the whole answer came; None if
        it did not."""
        if heard_s is not None:
            self.heard(heard_s)
        if attempt.decoding:
            self.decoding -= 1
        self.in_flight -= 1
        self.attempts.discard(attempt)
        if attempt.is_beyond:
            self.running.beyond -= 1
        elif attempt.routing.runs:
            routing = attempt.routing
            self.running.remove(routing.priority, tokens, routing.tenant, routing.prompts)

    def ends_prefill(self, tokens: int) -> None:
        """It has computed so many tokens, or does not have to."""
        self.pending_tokens -= tokens

    def begins_decoding(self) -> None:
        """An attempt has its first token."""
        self.decoding += 1

    def view(self, held: Held, session_tokens: int, now_s: float) -> WorkerView:
        """This worker as a decision compares it, for a prompt. held: what it holds of the prompt.
        session_tokens: of the sessions that live there."""
        return WorkerView(
            self.id,
            held.expected_tokens,
            self.total_pending_tokens(now_s),
            self.decoding + self.peer_load.decoding,
            self.recent_prefill.at(now_s),
            session_tokens,
            1.0 if self.recovered_s is None else self.warmth(now_s),
            held.host_tokens,
            held.shared_tokens,
            self.load_share,
            self.shared_share,
            *self.weights,
        )

    def publish(self, *, prefixes: bool) -> None:
        """It says whether it publishes the prefixes that it holds, or its events have ended."""
        self.publishes = prefixes

    def note_shares(self, load_share: float | None, shared_share: float | None) -> None:
        """Takes over what a token costs that it loads; None: as before."""
        self.load_share = load_share or self.load_share
        self.shared_share = shared_share or self.shared_share
        self._measure_pool()

    def note_faults(self, caches_off: list[str] | None, degraded: list[str] | None) -> None:
        """Takes over which caches are off and which features it lacks; None: as before."""
        self.caches_off = self.caches_off if caches_off is None else caches_off
        self.degraded = self.degraded if degraded is None else degraded

    def left(self, uncached_tokens: int) -> None:
        """A request that its scheduler runs has left without an answer. What it began there may go
        on, so it still has to show life."""
        self.is_owing = True
        self.left_tokens = max(self.left_tokens, uncached_tokens)

    def silent_s(self, now_s: float) -> float:
        """How long it has had work and shown no life; 0 if it has none or sends no events."""
        has_work = self.in_flight > 0 or self.is_owing
        return now_s - self.last_heard_s if self.sends_events and has_work else 0.0

    @property
    def sends_events(self) -> bool:
        """Whether it shows life in events."""
        return self.publishes or bool(self.report)

    def stopped_s(self, now_s: float) -> float:
        """When it last showed life. Of one that is not ready, when it did before that."""
        if not self.ready and self.unready_s is not None:
            return self.unready_s
        return now_s - self.silent_s(now_s)

    @property
    def stalled_after_s(self) -> float:
        """After how much silence it is stalled, with the requests that it has."""
        most = max((attempt.uncached_tokens for attempt in self.attempts), default=0)
        return stalled_after_s(max(most, self.left_tokens), self.pace.tokens_per_s)

    def warmth(self, now_s: float) -> float:
        """Rises from 0 to 1 over the first seconds after it came back; 1 otherwise."""
        if self.recovered_s is None:
            return 1.0
        return min((now_s - self.recovered_s) / SLOW_START_S, 1.0)

    def apply_load(self, load: Mapping[str, Any], now_s: float) -> None:
        """Takes over the load that the engine reports of itself."""
        self.report = load
        if "prefill_ms" in load:
            self.pace.report(load.get("prefill_tokens", 0), load["prefill_ms"], now_s)
        self._measure_pool()
        self.pinned_tokens = load.get("pinned_tokens", 0)
        ours = self.pending_tokens + self.peer_load.pending_tokens
        difference = load.get("pending_tokens", 0) - ours
        self._correction = _Correction(difference, self._correction.tokens, now_s)
        tokens, max_running = load.get("capacity_tokens", 0), load.get("max_running", 0)
        is_known = tokens > 0 and max_running > 0
        self.capacity = (
            Capacity(tokens, max_running, load.get("queued", 0), load.get("context_tokens"))
            if is_known
            else None
        )

    def clear_load(self) -> None:
        """Drops the reported load, because the engine reports no longer."""
        self.report = {}
        self._measure_pool()
        self.pinned_tokens = 0
        self.capacity = None
        self._correction = _NO_CORRECTION

    def _measure_pool(self) -> None:
        tokens = self.report.get("capacity_tokens", 0)
        host_tokens = self.report.get("host_capacity_tokens", 0)
        self.pool_tokens = pool_tokens(tokens, host_tokens, self.load_share) if tokens else 0.0
        self.refill_s = self.pace.seconds_of(self.pool_tokens)

    def total_pending_tokens(self, now_s: float) -> int:
        """What it still has to prefill, by the accounts of all balancers and its own."""
        ours, correction = self.pending_tokens + self.peer_load.pending_tokens, self._correction
        if correction is _NO_CORRECTION:
            return ours
        return max(ours + correction.at(now_s), 0)


class _Correction(NamedTuple):
    """The difference between an engine's account of its pending tokens and ours.

    A report may be older than the requests that we sent or saw finish since. So until it is
    SETTLED_S old, a report counts only as far as the report before it agrees.
    """

    tokens: int = 0
    before: int = 0
    reported_s: float = 0.0

    def at(self, now_s: float) -> int:
        if now_s - self.reported_s >= SETTLED_S:
            return self.tokens
        if (self.tokens < 0) is not (self.before < 0):
            return 0
        return min(self.tokens, self.before, key=abs)


_NO_CORRECTION = _Correction()
