"""Reads a body: what it names, its prompt, and the body for the engine. No state, no waiting.

    plan, body -> what it names of the store, if anything
    plan, body, what was found -> its reading

The event loop reads small bodies itself, and has large ones read in another process.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
import orjson

from sgl_ext.balancer.conversations import contexts
from sgl_ext.balancer.conversations.expansion import STORED_PATHS, Expander, Found, Named, Turn
from sgl_ext.balancer.routing.routing_request import Prompt, read_prompt
from sgl_ext.limits.bounds import MAX_TOOLS, UNCOUNTED_BYTES, Excess, find_excess, find_many
from sgl_ext.prompts.blocks import NamedBlock
from sgl_ext.prompts.cache_miss import Settings, settings_of
from sgl_ext.protocols.cache_diagnostics import Question, read_question
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import detect, of_path, with_name
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.client import SUBAGENT, harness_of, read_headers
from sgl_ext.reading.field_types import find_wrong_field
from sgl_ext.reading.protocol import Json
from sgl_ext.reading.strip import HeaderStrip, Stripped, strip_request
from sgl_ext.settings.schema import HINTED, DefaultHint
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints

# A field of the header line that leads Claude Code's prompts, and that is stripped.
_BILLING, _IS_SUBAGENT = "cc_version", "cc_is_subagent"


class HintRules:
    """The operator's default hints. `if rules` is whether there are any."""

    def __init__(self, rows: Sequence[DefaultHint] = ()) -> None:
        self._tables: dict[str, dict[str, DefaultHints]] = {of: {} for of in HINTED}
        for row in rows:
            hints = DefaultHints(row.priority, row.osl, row.prefill, row.ttl_s)
            self._tables[row.of][row.name] = hints
        self._has_any = bool(rows)

    def __bool__(self) -> bool:
        return self._has_any

    def of(self, tenant: str, headers: Mapping[bytes, bytes]) -> "RequestDefaults":
        """What is known of a request before its body is read. headers: with lower-case names."""
        plain = billed = ""
        agent: tuple[str, ...] = ()
        if self._tables["harness"]:
            plain, billed = harness_of(headers, {}), harness_of(headers, {_BILLING: ""})
        if self._tables["agent"]:
            facts = read_headers(headers)
            agent = (facts.agent_type, facts.request_class)
        return RequestDefaults(self, tenant, plain, billed, agent)

    def named(self, names: Mapping[str, Sequence[str]]) -> list[tuple[str, DefaultHints]]:
        """The hints of these names, by what they are of, the first to win first."""
        found = [(of, name, self._tables[of].get(name)) for of in HINTED for name in names[of]]
        return [(f"{of} {name}", hints) for of, name, hints in found if hints is not None]


class RequestDefaults(NamedTuple):
    """A request's tenant, and its harness: without a stripped header line, and with Claude Code's.
    It goes to the process that reads large bodies.

    agent: names of its kind of agent, as its headers state them, the most special first.
    """

    rules: HintRules
    tenant: str
    harness: str
    billed: str
    agent: tuple[str, ...] = ()

    def of(self, body: Any, stripped: Mapping[str, str]) -> DefaultHints:
        """The defaults of a request. stripped: the fields of its stripped header lines."""
        merged = NO_DEFAULTS
        for _, hints in self._named(body, stripped):
            merged = hints if merged is NO_DEFAULTS else merged.over(hints)
        return merged

    def explain(self, body: Any, stripped: Mapping[str, str]) -> dict[str, Any]:
        """Each default that a request has, with the table that it is from."""
        found: dict[str, Any] = {}
        for source, hints in self._named(body, stripped):
            for key in hints.__struct_fields__:
                if (value := getattr(hints, key)) is not None and key not in found:
                    found[key] = {"value": value, "from": source}
        return found

    def _named(self, body: Any, stripped: Mapping[str, str]) -> list[tuple[str, DefaultHints]]:
        model = body.get("model") if isinstance(body, dict) else None
        agent = self.agent
        if agent and not agent[-1] and stripped.get(_IS_SUBAGENT) == "true":
            agent = (*agent, SUBAGENT)
        return self.rules.named(
            {
                "tenant": (self.tenant,),
                "agent": agent,
                "harness": (self.billed if _BILLING in stripped else self.harness,),
                "model": (model if isinstance(model, str) else "",),
            }
        )


_INCLUDED = {"include_usage": True}
_ADDED = b'"stream_options":%b,' % orjson.dumps(_INCLUDED)
_NO_CHOICES, _USAGE = b'"choices":[]', b'"usage":{'
_END = b"\n\n"
PATHS = ("/v1/chat/completions", "/v1/completions")


def with_usage(path: str, document: Any, body: bytes | bytearray) -> bytes | None:
    """The body that also asks for the usage of its stream; None if there is nothing to change.

    document: the parsed body.
    """
    if path not in PATHS or not isinstance(document, dict) or document.get("stream") is not True:
        return None
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return None  # the engine answers 400
    if "stream_options" not in document:  # parsing and writing a long prompt again takes time
        start = body.index(b"{") + 1
        return b"".join((body[:start], _ADDED, body[start:]))
    if options and options.get("include_usage"):
        return None
    try:
        return orjson.dumps(document | {"stream_options": (options or {}) | _INCLUDED})
    except TypeError:
        return None  # it is nested too deeply to be written


def without_usage(data: bytes) -> bytes:
    """Whole events without the one that states the usage."""
    if _NO_CHOICES not in data:
        return data
    events = data.split(_END)
    return _END.join(e for e in events if not (_NO_CHOICES in e and _USAGE in e))


# A body with none of these fields names nothing that is stored, and asks nothing of its cache.
_NAMING = frozenset(
    ("context_id", "context_blocks", "nvext", "thread", "diagnostics", "prompt_cache_options")
)
# A smaller body cannot have too many of anything.
_SMALL_BODY_BYTES = 2 * MAX_TOOLS


class ReadPlan(NamedTuple):
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
    defaults: RequestDefaults | None = None
    remembers: bool = False
    tenant: str = ""


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
    model: that the request names.
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
    model: object = None


class BodyReader:
    """Reads bodies by the settings of the balancer. One a process; not thread-safe."""

    def __init__(self, strip: HeaderStrip, *, sort_tools: bool, keeps_turns: bool) -> None:
        """keeps_turns: whether responses are stored."""
        self._strip = strip
        self._strip_headers = strip.headers_only
        self._sort_tools = sort_tools
        self.expander = Expander(keeps_turns)

    def read(
        self, plan: ReadPlan, body: bytes | bytearray, found: Found | None = None
    ) -> Reading | Named:
        """Reads a body, or what it names unless that was `found`.

        Raises BalancerError 400 for a malformed body or an unknown id, 404 for an unknown context.
        """
        document = parse_json(body)
        if (wrong := find_wrong_field(document)) is not None:
            raise BalancerError(HTTPStatus.BAD_REQUEST, wrong.message, param=wrong.field)
        path = plan.path
        protocol = of_path(path)
        if plan.warms and (detected := _prefill_protocol(plan, document)) is not None:
            protocol, path = detected, detected.paths[0]
        may_name = type(document) is dict and not _NAMING.isdisjoint(document)
        has_turns = False
        if may_name or path in STORED_PATHS:
            has_turns = self.expander.has_turns(path, remembers=plan.remembers, may_name=may_name)
        if found is None and (may_name or has_turns):
            named = self.expander.names(path, document, remembers=plan.remembers)
            if named is not None:
                return named
        question = read_question(path, document) if plan.runs and may_name else None
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
                path, document, found, remembers=plan.remembers
            )
            if expanded is not document:
                document = with_name(protocol, expanded) if plan.warms else expanded
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
        if plan.defaults is not None:
            defaults = plan.defaults.of(document, stripped.fields)
        prompt = None
        if plan.runs or plan.warms:
            prompt = read_prompt(
                protocol,
                plan.hints,
                stripped.body,
                size_bytes,
                plan.ceiling,
                sort_tools=self._sort_tools,
                defaults=defaults,
            )
        counted = None
        if plan.is_charged:
            counted = with_usage(path, document, body if sent is None else sent)
        sent = sent if counted is None else counted
        is_named = question is not None or (plan.runs and path in RESPONSES.paths)
        is_object = isinstance(document, dict)
        streams = plan.runs and is_object and document.get("stream") is True
        return Reading(
            path,
            sent,
            turn,
            marks_left_out,
            stripped,
            prompt,
            hides_usage=counted is not None,
            defaults=defaults,
            saved_bytes=saved_bytes,
            context=context,
            question=question,
            settings=settings_of(document) if is_named and is_object else None,
            beat=protocol.beat if streams else b"",
            model=document.get("model") if is_object else None,
        )


def parse_json(body: bytes | bytearray) -> Any:
    """The document of a body. Raises BalancerError 400 if it is no JSON, or has too many parts."""
    if len(body) > UNCOUNTED_BYTES:
        _require_few(find_many(body))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


def with_model(body: bytes | bytearray, name: str) -> bytes:
    """A body that was read, with another name of its model."""
    try:
        return orjson.dumps({**orjson.loads(body), "model": name})
    except TypeError:
        raise BalancerError(HTTPStatus.BAD_REQUEST, "body: is nested too deeply") from None


def read_registration(body: bytes | bytearray) -> tuple[Json, bytes]:
    """A context that a client registers: what it is, and its items. Raises BalancerError 400."""
    return contexts.read_registration(parse_json(body))


def _require_few(excess: Excess | None) -> None:
    if excess is not None:
        raise BalancerError(HTTPStatus.BAD_REQUEST, excess.message, param=excess.field)


def _prefill_protocol(plan: ReadPlan, document: Any) -> Any:
    """The protocol of the body of /v1/prefill, by the rules of the engine."""
    query = plan.target.partition(b"?")[2].decode("latin-1")
    named = parse_qs(query, keep_blank_values=True).get("protocol")
    headers = {name.decode("latin-1"): "" for name in plan.headers}
    return detect(headers, named[-1] if named else None, document)
