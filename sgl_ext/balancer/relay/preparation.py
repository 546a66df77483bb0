"""Prepares a request from its body's reading, before it is placed: its route and its charge."""

from collections.abc import Mapping

import msgspec

from sgl_ext.balancer.access.rate_limits import Charge
from sgl_ext.balancer.conversations.contexts import (
    COVERS,
    HEADER,
    SKIPPED,
    Registration,
    is_wanted,
    read_made,
)
from sgl_ext.balancer.conversations.response_turns import LaneTurns, ResponseRecorder
from sgl_ext.balancer.conversations.threads import ThreadRecorder
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.relay.reading import Reading, ReadPlan
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.cache_turns import CacheTurn
from sgl_ext.balancer.reporting.diagnosis import PromptDiagnosis
from sgl_ext.balancer.routing.models import ModelPool
from sgl_ext.balancer.routing.routing_request import NO_ROUTING, RoutingRequest
from sgl_ext.protocols.errors import BalancerError, no_memory
from sgl_ext.protocols.registry import GENERATE
from sgl_ext.reading.client import NO_FACTS, ClientFacts, shown_name, stated_session, with_body
from sgl_ext.wire.headers import NO_DEFAULTS, TENANT_HEADER, defaults_line

Recorder = ResponseRecorder | ThreadRecorder


class Preparation(msgspec.Struct, frozen=True):
    """What is known of a request before it is placed.

    recorder: stores the response, if the request continues or stores one.
    facts: what the client says about itself.
    moved: how many volatile lines of each kind were moved.
    diagnosis: how the prompt differs from earlier ones, if prompts are compared.
    charge: what its tenant was charged, if it has limits.
    hides_usage: whether the engine reports a usage that the client did not request.
    sums_items: whether the usage of the answer's items has to be added up.
    lines: header lines for the engine, besides those of the head.
    saved_bytes: what the client would have sent in addition if it named nothing that is stored.
    context_path: the path of its protocol if it asks for a context of what its marks cover.
    turn: what the doctor and cache diagnostics learn of it; None if neither needs to.
    beat: as of its reading.
    hints: what the request states and counts for it, by name.
    pool: of the model that answers; None for any. falls_back: it is not the one that is meant.
    """

    routing: RoutingRequest
    recorder: Recorder | None
    diagnosis: PromptDiagnosis | None
    charge: Charge | None
    facts: ClientFacts = NO_FACTS
    moved: Mapping[str, int] = {}
    hides_usage: bool = False
    sums_items: bool = False
    lines: bytes = b""
    saved_bytes: int = 0
    context_path: str = ""
    turn: CacheTurn | None = None
    beat: bytes = b""
    pool: ModelPool | None = None
    falls_back: bool = False
    hints: tuple[str, ...] = ()


_CONTEXT = HEADER.encode()
NOT_PREPARED = Preparation(NO_ROUTING, None, None, None)


def plan_of(services: Services, head: RequestHead) -> ReadPlan | None:
    """What to read a request's body for; None if it does not decide where the request goes. The
    head keeps it: `RequestHead.derived`."""
    route = head.route
    if route is None or not route.placed:
        return None
    tenant, rules = services.tenants.of_headers(head.hints), services.bodies.hint_rules
    plan = ReadPlan(
        head.path,
        head.target,
        tuple(head.fields),
        head.hints,
        route.runs,
        route.warms,
        tenant.max_priority,
        services.rate_limits.charges(head.tenant, head.key),
        rules.of(tenant.name, head.fields) if rules else None,
        tenant=tenant.name,
    )
    head.keep(plan)
    return plan


def prepare(
    services: Services,
    request: Request,
    plan: ReadPlan,
    reading: Reading,
    pool: ModelPool,
    turns: LaneTurns | None = None,
) -> Preparation:
    """How to route a request, whose tenant is not charged yet. pool: of the model that answers.
    turns: as of an exchange.

    The body for the engine is put into `request.body`. Raises BalancerError 503 without room for
    the body.
    """
    head = request.head
    if reading.body is not None:
        request.body = reading.body
        if not request.hold.take_up_to(len(request.body)):
            raise no_memory()
    if reading.marks_left_out:
        services.metrics.store_events.counts[("mark_left_out",)] += reading.marks_left_out
    wants_context = _CONTEXT in head.fields and is_wanted(head.fields[_CONTEXT])
    if reading.saved_bytes:
        services.metrics.saved_bytes.inc(reading.saved_bytes)
    stripped = reading.stripped
    if stripped.headers:
        services.metrics.stripped_headers.inc(stripped.headers)
    if stripped.moved:
        for kind, count in stripped.moved.items():
            services.metrics.clients.volatile_lines.counts[(kind,)] += count
    session = ""
    if plan.runs and (stated := stated_session(plan.hints, stripped.body)):
        tenant, hashes = plan.hints.get(TENANT_HEADER, ""), services.router.hashes_sessions
        session = shown_name(stated, tenant, hashes=hashes)
    facts = head.facts
    if stripped.fields or session:
        facts = with_body(facts, stripped.fields, session)
    for name in facts.ignored:
        services.metrics.clients.hints_ignored.counts[(name,)] += 1
    routing, diagnosis, prompt, earlier = NO_ROUTING, None, None, None
    if reading.question is not None:
        earlier = services.cache_turns.prompt_before(plan.tenant, reading.question)
    if reading.prompt is not None:
        routing = pool.router.routing_of(reading.prompt, plan.hints, warms=plan.warms)
        if plan.runs and services.request_log.detector is not None:
            diagnosis, prompt = services.request_log.detector.diagnose(
                reading.path,
                facts,
                plan.hints,
                stripped,
                routing,
                request.body,
                reading.context,
            )
    # Another process that read a large body returns a copy.
    has_defaults = plan.defaults is not None and reading.defaults != NO_DEFAULTS
    recorder = None
    if reading.turn is not None and plan.runs:
        recorder = services.bodies.conversations.recorder(reading.turn, plan.tenant, turns)
    turn = None
    if prompt is not None or reading.settings is not None:
        turn = CacheTurn(
            reading.path, plan.tenant, reading.question, reading.settings, prompt, earlier
        )
    return Preparation(
        routing,
        recorder,
        diagnosis,
        None,
        facts,
        stripped.moved,
        hides_usage=reading.hides_usage,
        sums_items=plan.is_charged and reading.path in GENERATE.paths,
        lines=defaults_line(reading.defaults) if has_defaults else b"",
        saved_bytes=reading.saved_bytes,
        context_path=reading.path if wants_context else "",
        turn=turn,
        beat=reading.beat,
        pool=pool,
        hints=reading.prompt.hints if reading.prompt is not None else (),
    )


# Of the same size, copying and hashing messages takes several times as long as reading them.
_LARGE_BYTES = 256 << 10
_STORED = ("made", "renewed")


async def make_context(
    services: Services, request: Request, path: str, *, names_stored: bool
) -> bytes:
    """The header lines of the answer to a request of the protocol of this path. Never raises.

    names_stored: whether the request is more than its client sent.
    """
    result, lines = "failed", b""
    with services.context_guard:
        try:
            result = "names_stored"
            if not names_stored:
                result, lines = await _make(services, request, path)
        except BalancerError:  # no room, or the store fails: both are counted there
            result = "unavailable"
    services.metrics.contexts_made.counts[(result,)] += 1
    return lines if result in _STORED else f"{SKIPPED}: {result}\r\n".encode()


async def _make(services: Services, request: Request, path: str) -> tuple[str, bytes]:
    body, strip = request.body, services.bodies.strip
    if len(body) > _LARGE_BYTES:
        tenant = request.head.tenant
        made, items = await services.bodies.large.call(tenant, body, read_made, path, strip)
    else:
        made, items = read_made(body, path, strip)
    if items is None:
        return made, b""
    about, covers = made
    tenant = services.tenants.of_headers(request.head.hints).name
    result = await services.bodies.conversations.keep_context(tenant, Registration(about, items))
    covered = ", ".join(f"{name}={count}" for name, count in covers.items())
    return result, f"{HEADER}: {about['context_id']}\r\n{COVERS}: {covered}\r\n".encode()
