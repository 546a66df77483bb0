"""Reads a body: what it names, its prompt, and the body for the engine. No state, no waiting.

    asked, body -> what it names of the store, if anything
    asked, body, what was found -> its reading

The event loop reads small bodies itself, and has large ones read in another process.
"""

from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
import orjson

from sgl_ext.balancer.conversations import contexts
from sgl_ext.balancer.conversations.expansion import Expander, Found, Named, Turn
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.relay.hidden_usage import with_usage
from sgl_ext.balancer.relay.hint_rules import AskedHints
from sgl_ext.balancer.routing.prompt import Prompt, read_prompt
from sgl_ext.limits.bounds import MAX_TOOLS, UNCOUNTED_BYTES, Excess, find_excess, find_many
from sgl_ext.prompts.blocks import NamedBlock
from sgl_ext.prompts.cache_miss import Settings, settings_of
from sgl_ext.protocols.cache_diagnostics import Question, read_question
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import detect, of_path, with_name
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.field_types import find_wrong_field
from sgl_ext.reading.protocol import Json
from sgl_ext.reading.strip import HeaderStrip, Stripped, strip_request
from sgl_ext.settings.schema import Tenant
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints

# A body with none of these fields names nothing that is stored, and asks nothing of its cache.
_NAMING = frozenset(
    ("context_id", "context_blocks", "nvext", "thread", "diagnostics", "prompt_cache_options")
)
# A smaller body cannot have too many of anything.
_SMALL_BODY_BYTES = 2 * MAX_TOOLS


class Asked(NamedTuple):
    """What is known of a request before its body is read.

    headers: the names of its headers. hints: those that matter, with their values.
    tenant: the name of its tenant. ceiling: the highest priority of that tenant.
    is_charged: whether its tenant pays for what it computes.
    defaults: finds its default hints; None if there are none.
    remembers: whether its connection remembers turns, stored or not.
    """

    path: str
    target: bytes
    headers: tuple[bytes, ...]
    hints: Mapping[str, str]
    runs: bool
    warms: bool
    ceiling: int
    is_charged: bool
    defaults: AskedHints | None = None
    remembers: bool = False
    tenant: str = ""


def asked_by(
    head: RequestHead,
    tenant: Tenant,
    *,
    is_charged: bool,
    defaults: AskedHints | None = None,
) -> Asked:
    """What the head of a request with a route says."""
    route = head.route
    assert route is not None, "requests without a route are not read"
    return Asked(
        head.path,
        head.target,
        tuple(head.fields),
        head.hints,
        route.runs,
        route.warms,
        tenant.max_priority,
        is_charged,
        defaults,
        tenant=tenant.name,
    )


class Reading(msgspec.Struct, frozen=True, gc=False):
    """What was read.

    path: that of its protocol.
    body: the body for the engine; None if it is the one that the client sent.
    turn: its turn of a stored conversation.
    marks_left_out: cache marks of its context for which it had no room.
    stripped: the stripped document; another process returns only its short values.
    prompt: None if no engine computes it.
    hides_usage: whether the engine reports a usage that the client did not request.
    defaults: its default hints.
    saved_bytes: what the client would have sent in addition if it named nothing that is stored.
    context: the blocks of the context that it names.
    question: what it asks about its cache; None if nothing.
    settings: those that matter to the cache; None if no later request can name its answer.
    beat: what its stream says while the answer is awaited; b"" if it asks for no stream of events.
    """

    path: str
    body: bytes | None
    turn: Turn | None
    marks_left_out: int
    stripped: Stripped
    prompt: Prompt | None
    hides_usage: bool
    defaults: DefaultHints = NO_DEFAULTS
    saved_bytes: int = 0
    context: tuple[NamedBlock, ...] = ()
    question: Question | None = None
    settings: Settings | None = None
    beat: bytes = b""


class BodyReader:
    """Reads bodies by the settings of the balancer. One a process; not thread-safe."""

    def __init__(self, strip: HeaderStrip, *, sort_tools: bool, keeps_turns: bool) -> None:
        """keeps_turns: whether responses are stored."""
        self._strip = strip
        self._strip_headers = strip.headers_only
        self._sort_tools = sort_tools
        self.expander = Expander(keeps_turns)

    def read(
        self, asked: Asked, body: bytes | bytearray, found: Found | None = None
    ) -> Reading | Named:
        """Reads a body, or what it names unless that was `found`.

        Raises BalancerError 400 for a malformed body or an unknown id, 404 for an unknown context.
        """
        document = parse_json(body)
        if (wrong := find_wrong_field(document)) is not None:
            raise BalancerError(HTTPStatus.BAD_REQUEST, wrong.message, param=wrong.field)
        path = asked.path
        protocol = of_path(path)
        if asked.warms and (detected := _prefill_protocol(asked, document)) is not None:
            protocol, path = detected, detected.paths[0]
        may_name = type(document) is dict and not _NAMING.isdisjoint(document)
        has_turns = self.expander.has_turns(path, remembers=asked.remembers)
        if found is None and (may_name or has_turns):
            named = self.expander.names(path, document, remembers=asked.remembers)
            if named is not None:
                return named
        question = read_question(path, document) if asked.runs and may_name else None
        own = None
        if found is not None and found.context is not None:
            # The context's texts will stand before the headers.
            own = strip_request(protocol, document, self._strip_headers)
            document = own.body
        turn: Turn | None = None
        marks_left_out = 0
        context: tuple[NamedBlock, ...] = ()
        sent: bytes | None = None
        if found is not None or has_turns:
            expanded, turn, marks_left_out, context = self.expander.expand(
                path, document, found, remembers=asked.remembers
            )
            if expanded is not document:
                document = with_name(protocol, expanded) if asked.warms else expanded
                try:
                    sent = orjson.dumps(document)
                except TypeError:
                    error = "body: is nested too deeply"
                    raise BalancerError(HTTPStatus.BAD_REQUEST, error) from None
        size_bytes = len(body if sent is None else sent)
        saved_bytes = 0 if found is None else max(size_bytes - len(body), 0)
        if size_bytes > _SMALL_BODY_BYTES:
            _require_few(find_excess(document, protocol.turns_field, protocol.instruction_fields))
        stripped = strip_request(protocol, document, self._strip)
        if own is not None:
            fields = {**own.fields, **stripped.fields}
            stripped = stripped._replace(
                headers=own.headers + stripped.headers,
                fields=fields,
                moved=Counter(own.moved) + Counter(stripped.moved),
            )
        defaults = NO_DEFAULTS
        if asked.defaults is not None:
            defaults = asked.defaults.of(document, stripped.fields)
        prompt = None
        if asked.runs or asked.warms:
            prompt = read_prompt(
                protocol,
                asked.hints,
                stripped.body,
                size_bytes,
                asked.ceiling,
                sort_tools=self._sort_tools,
                defaults=defaults,
            )
        asking = None
        if asked.is_charged:
            asking = with_usage(path, document, body if sent is None else sent)
        sent = sent if asking is None else asking
        is_named = question is not None or (asked.runs and path in RESPONSES.paths)
        is_named = is_named and isinstance(document, dict)
        return Reading(
            path,
            sent,
            turn,
            marks_left_out,
            stripped,
            prompt,
            hides_usage=asking is not None,
            defaults=defaults,
            saved_bytes=saved_bytes,
            context=context,
            question=question,
            settings=settings_of(document) if is_named else None,
            beat=protocol.beat if asked.runs and _streams(document) else b"",
        )


def _streams(document: Any) -> bool:
    return isinstance(document, dict) and document.get("stream") is True


def parse_json(body: bytes | bytearray) -> Any:
    """The document of a body. Raises BalancerError 400 if it is no JSON, or has too many parts."""
    if len(body) > UNCOUNTED_BYTES:
        _require_few(find_many(body))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


def read_registration(body: bytes | bytearray) -> tuple[Json, bytes]:
    """A context that a client registers: what it is, and its items. Raises BalancerError 400."""
    return contexts.read_registration(parse_json(body))


def _require_few(excess: Excess | None) -> None:
    if excess is not None:
        raise BalancerError(HTTPStatus.BAD_REQUEST, excess.message, param=excess.field)


def _prefill_protocol(asked: Asked, document: Any) -> Any:
    """The protocol of the body of /v1/prefill, by the rules of the engine."""
    query = asked.target.partition(b"?")[2].decode("latin-1")
    named = parse_qs(query, keep_blank_values=True).get("protocol")
    headers = {name.decode("latin-1"): "" for name in asked.headers}
    return detect(headers, named[-1] if named else None, document)
