"""Reads a request's body before it is placed: what it names, how to route it, and its charge."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson

from sgl_ext.balancer.access.rate_limits import Charge
from sgl_ext.balancer.conversations.conversation_store import Found, Named
from sgl_ext.balancer.conversations.stored_turns import ResponseRecorder
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.relay.hidden_usage import with_usage
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.diagnosis import PromptDiagnosis
from sgl_ext.balancer.routing.attempts import NO_ROUTING, RoutingRequest
from sgl_ext.limits.bounds import MAX_TOOLS
from sgl_ext.limits.elements import Excess, find_excess, find_many
from sgl_ext.protocols.errors import BalancerError, no_memory
from sgl_ext.protocols.native import GENERATE
from sgl_ext.protocols.registry import detect, of_path, with_name
from sgl_ext.requests.field_types import find_wrong_type
from sgl_ext.requests.protocol import Protocol
from sgl_ext.requests.session import hints_of
from sgl_ext.requests.strip import strip_request

# A smaller body cannot have too many of anything.
_SMALL_BODY_BYTES = 2 * MAX_TOOLS


class Preparation(NamedTuple):
    """What is known of a request before it is placed.

    recorder: stores the response, if the request continues or stores one.
    diagnosis: how the prompt differs from earlier ones, if prompts are compared.
    charge: what its tenant was charged, if it has limits.
    hides_usage: whether the engine reports a usage that the client did not request.
    sums_items: whether the usage of the answer's items has to be added up.
    """

    routing: RoutingRequest
    recorder: ResponseRecorder | None
    diagnosis: PromptDiagnosis | None
    charge: Charge | None
    hides_usage: bool = False
    sums_items: bool = False


NOT_PREPARED = Preparation(NO_ROUTING, None, None, None)


class Draft(NamedTuple):
    """A parsed request. named: what it names of the stored responses and contexts."""

    document: Any
    hints: Mapping[str, str]
    protocol: Protocol
    path: str
    tenant: str
    named: Named | None


def parse(services: Services, request: Request) -> Draft | None:
    """Parses a request's body; None if it does not decide where the request goes.

    Raises BalancerError 400 for a malformed body.
    """
    head = request.head
    route = head.route
    if route is None or not route.placed:
        return None
    document = parse_json(request.body)
    if (wrong := find_wrong_type(document)) is not None:
        raise BalancerError(HTTPStatus.BAD_REQUEST, wrong.message, param=wrong.field)
    hints, path = hints_of(head.fields), head.path
    protocol = of_path(path)
    if route.warms and (detected := _prefill_protocol(head, document)) is not None:
        protocol, path = detected, detected.paths[0]
    tenant = services.router.tenants.asking(hints).name
    named = services.conversations.names(path, document)
    # The document stays in memory beside the body while the store is read.
    if named is not None and not request.hold.take_up_to(2 * len(request.body)):
        raise no_memory()
    return Draft(document, hints, protocol, path, tenant, named)


def prepare(
    services: Services, request: Request, draft: Draft, found: Found | None = None
) -> Preparation:
    """Reads how to route a request, and charges its tenant.

    found: what `draft.named` names. Its content is put into `request.body`. Raises BalancerError
    400 for a malformed body or an unknown id, 429 above a rate limit.
    """
    document, hints, protocol, path, tenant, _ = draft
    head, route = request.head, request.head.route
    assert route is not None, "only requests with a route are parsed"
    expanded, recorder = services.conversations.expand(path, document, tenant, found)
    if expanded is not document:
        document = with_name(protocol, expanded) if route.warms else expanded
        try:
            request.body = orjson.dumps(document)
        except TypeError:
            raise BalancerError(HTTPStatus.BAD_REQUEST, "body: is nested too deeply") from None
        if not request.hold.take_up_to(len(request.body)):
            raise no_memory()
    if len(request.body) > _SMALL_BODY_BYTES:
        _require_few(find_excess(document, protocol.turns_field, protocol.instruction_fields))
    stripped = strip_request(protocol, document, services.strip)
    if stripped.headers:
        services.metrics.stripped_headers.inc(stripped.headers)
    routing, diagnosis = NO_ROUTING, None
    if route.runs or route.warms:
        size_bytes = len(request.body)
        routing = services.router.read(path, hints, stripped.body, size_bytes, warms=route.warms)
        if route.runs and services.request_log.detector is not None:
            diagnosis = services.request_log.detector.diagnose(
                path, head.fields, hints, stripped, routing, request.body
            )
    # What it claims of an engine is charged until its cost is known.
    claimed_tokens = routing.prompt_tokens + routing.output_tokens
    charge = services.rate_limits.admit(head.tenant, claimed_tokens)
    preparation = Preparation(routing, recorder if route.runs else None, diagnosis, charge)
    if charge is None:
        return preparation
    asking = with_usage(path, document, request.body)
    if asking is not None:
        request.body = asking
    return preparation._replace(hides_usage=asking is not None, sums_items=path in GENERATE.paths)


def parse_json(body: bytes | bytearray) -> Any:
    """The document of a body. Raises BalancerError 400 if it is no JSON, or has too many parts."""
    _require_few(find_many(body))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


def _require_few(excess: Excess | None) -> None:
    if excess is not None:
        raise BalancerError(HTTPStatus.BAD_REQUEST, excess.message, param=excess.field)


def _prefill_protocol(head: RequestHead, document: Any) -> Protocol | None:
    """The protocol of the body of /v1/prefill, by the rules of the engine."""
    query = head.target.partition(b"?")[2].decode("latin-1")
    named = parse_qs(query, keep_blank_values=True).get("protocol")
    headers = {name.decode("latin-1"): "" for name in head.fields}
    return detect(headers, named[-1] if named else None, document)
