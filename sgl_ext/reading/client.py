"""The sender of a request: its session and tenant, and what its client says about itself."""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
import xxhash

from sgl_ext.reading.hints import PRIORITY_HEADERS
from sgl_ext.reading.segments import Chain, salt_of
from sgl_ext.wire.headers import GROUP_HEADER, TENANT_HEADER

# The headers of agent harnesses; our own has precedence.
SESSION_HEADERS = (
    "x-sgl-ext-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-dynamo-session-id",
)
# A harness has one id for all its agents; these tell its sub-agents apart.
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")
# What a harness sends the request for. Of these classes it is its lead's, whose id is no header.
CLASS_HEADER = "x-claude-code-request-class"
_OF_LEADS = ("main", "compaction")
# A name that a log holds as it is.
_SHOWN = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")
FINAL_HEADER = "x-sgl-ext-session-final"
# Hermes' agents state theirs as one JSON object in base64url.
AGENT_HINT_HEADER = "x-agent-hint"
_HINTS = (
    AGENT_HINT_HEADER,
    *SESSION_HEADERS,
    *AGENT_HEADERS,
    CLASS_HEADER,
    FINAL_HEADER,
    TENANT_HEADER,
    GROUP_HEADER,
    *PRIORITY_HEADERS,
)
_RAW = {name.encode(): name for name in _HINTS}


def session_key(headers: Mapping[str, str], body: Any, chain: Chain) -> int | None:
    """A number for an agent's conversation, equal for all its turns; None if it is unknown.

    The id that the client states decides, with the agent's id if one is stated. The system text
    and the tools may change then. A harness has one id for all its agents. Agents
    without an id are distinguished by their first user message. If no id is stated, everything
    up to the end of the first user message decides. Two cache groups, and two tenants, never have
    the same key. `headers` has lower-case names.
    """
    stated, tenant = stated_session(headers, body), headers.get(TENANT_HEADER, "")
    if stated is None:
        if chain.session is None or not tenant:
            return chain.session
        return _key(headers, b"%032x" % chain.session)
    agent = _stated_agent(headers, stated)
    if agent is None:
        opening = b"%016x" % chain.opening
        return _key(headers, stated.encode("utf-8", "surrogatepass"), opening)
    return _key(headers, *(id.encode("utf-8", "surrogatepass") for id in (stated, "", agent)))


_MIXER, _MASK = 0x9E3779B97F4A7C15F39CC0605CEDC835, (1 << 128) - 1


def agent_of(session: int | None, chain: Chain) -> int | None:
    """The agent whose memory is counted: one conversation of a session. A client states its
    session's id itself, so that it could state one for many conversations."""
    begin = chain.session
    if session is None or begin is None:
        return session
    return (session * _MIXER ^ begin) & _MASK


def thread_key(key: int | None, chain: Chain) -> int | None:
    """A number for the turns of a conversation that begin alike: another system text is another
    thread. key: of the conversation (`session_key`)."""
    if key is None or chain.session is None or key == chain.session:
        return key
    return xxhash.xxh3_128_intdigest(b"%032x%032x" % (key, chain.session))


def _key(headers: Mapping[str, str], *parts: bytes) -> int:
    """The hash of parts. No part has the byte 0xFF, as no text in UTF-8 has it."""
    tenant = headers.get(TENANT_HEADER, "").encode("utf-8", "surrogatepass")
    return xxhash.xxh3_128_intdigest(b"\xff".join((salt_of(headers), tenant, *parts)))


def stated_session(headers: Mapping[str, str], body: Any) -> str | None:
    """The id that the client states for the conversation, or for the harness's session."""
    stated = None
    if headers:
        stated = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
    if stated is None and isinstance(body, dict):
        key = body.get("prompt_cache_key")
        stated = key if isinstance(key, str) and key else None
    return stated


def _stated_agent(headers: Mapping[str, str], session: str) -> str | None:
    """The id that the client states for the agent: "" for the lead, None if it does not say."""
    named = [headers.get(name) for name in AGENT_HEADERS]
    if agent := "/".join(agent for agent in named if agent and agent != session):
        return agent
    return "" if headers.get(CLASS_HEADER) in _OF_LEADS else None


def stated_name(headers: Mapping[str, str], body: Any) -> str:
    """The session as its client names it: the id that it states, and after a slash that of its
    sub-agent. "" if no id is stated."""
    if (stated := stated_session(headers, body)) is None:
        return ""
    agent = _stated_agent(headers, stated)
    return f"{stated}/{agent}" if agent else stated


def shown_name(stated: str, tenant: str, *, hashes: bool) -> str:
    """A stated name as logs and pages have it: as it is, so that it can be found by what the client
    prints; or as a hash.

    hashes: whether the operator wants hashes. Names that are long or not printable are hashes in
    any case. Two tenants never have the same hash. "" stays "".
    """
    if not stated or (not hashes and _SHOWN.fullmatch(stated)):
        return stated
    text = f"{tenant}\n{stated}"
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def hints_of(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers that are hints, from a request's raw headers; names in lower case."""
    found = {name: fields[raw].decode("latin-1") for raw, name in _RAW.items() if raw in fields}
    return with_agent_hint(found) if AGENT_HINT_HEADER in found else found


# Hermes' `X-Agent-Hint`: what it says, as the headers that mean the same. Those have precedence.
#
#     session, session_id        x-session-id
#     state, lifecycle_state     x-sgl-ext-session-final, if the state is one of _ENDED
#     soft_priority              x-dynamo-request-priority
#     pin, interval_ms           a lease on the whole prompt, for the interval if one is stated
#
# Its other fields are ignored: the balancer counts calls and measures gaps itself.

_ENDED = ("completed", "done", "ended", "final", "finished", "terminated")
_MOST_HINT_BYTES = 4096


def with_agent_hint(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers, with those that an agent hint stands for. Never raises."""
    hint = _agent_hint(headers.get(AGENT_HINT_HEADER, "")) or {}
    added: dict[str, str] = {}
    session = hint.get("session", hint.get("session_id"))
    is_named = isinstance(session, str) and _WORD.fullmatch(session) is not None
    if is_named and not any(headers.get(name) for name in SESSION_HEADERS):
        added["x-session-id"] = session
    if hint.get("state", hint.get("lifecycle_state")) in _ENDED and FINAL_HEADER not in headers:
        added[FINAL_HEADER] = "1"
    priority = hint.get("soft_priority")
    if type(priority) is int and not any(headers.get(name) for name in PRIORITY_HEADERS):
        added[PRIORITY_HEADERS[-1]] = str(priority)
    return {**headers, **added}


def stated_lease_s(headers: Mapping[str, str]) -> float | None:
    """How long an agent hint wants its prompt kept: None for as long as is usual, 0 if it does not
    want that."""
    if AGENT_HINT_HEADER not in headers:
        return 0.0
    hint = _agent_hint(headers[AGENT_HINT_HEADER]) or {}
    if hint.get("pin") is not True:
        return 0.0
    interval_ms = hint.get("interval_ms")
    if type(interval_ms) is not int or not 0 < interval_ms <= _DAY_MS:
        return None
    return interval_ms / 1000


def _agent_hint(stated: str) -> Mapping[str, Any] | None:
    """What an agent hint says; None if it is malformed."""
    try:
        if len(stated) > _MOST_HINT_BYTES or not stated.isascii():
            return None
        padded = stated.rstrip("=") + "=" * (-len(stated.rstrip("=")) % 4)
        hint = orjson.loads(base64.b64decode(padded, b"-_", validate=True))
    except (ValueError, binascii.Error, orjson.JSONDecodeError):
        return None
    return hint if isinstance(hint, dict) else None


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the client states that this is the conversation's last turn."""
    final = headers.get(FINAL_HEADER)
    return final is not None and final.strip().lower() in ("1", "true", "yes")


# What the client of a request says about itself: its program and version, the agent, the turn.
#
#   header                                     says it for
#   user-agent, originator                     all: the program and its version
#   x-claude-code-agent-id, -parent-agent-id   Claude Code: which sub-agent, and whose
#   x-claude-code-request-class, -agent-type, -prompt-id, -prev-tool-durations, -compaction,
#     -context-compacted                       Claude Code with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1
#   x-claude-1p-request-class                  Claude Code: `main`, `blocking-subagent`
#   x-codex-turn-metadata                      Codex: JSON with the turn, the thread and its source
#   x-codex-parent-thread-id                   Codex: a sub-agent's thread has a parent
#   x-session-id, x-parent-session-id          OpenCode: a sub-agent has a session with a parent
#   x-dynamo-session-id, -parent-session-id    agents of Dynamo's: likewise
#   anthropic-beta                             Claude Code: `claude-code-side-query-*`,
#                                              `prompt-caching-evict-*` (`gives_cache_back`)
#   x-agent-hint                               Hermes: what `with_agent_hint` reads
#   cc_version, cc_entrypoint, cc_workload, cc_is_subagent
#                                              Claude Code: fields of the header line that the strip
#                                              removes from the system prompt (`strip.py`)
#
# These are hints from strangers: no decision about access or money may rest on them. A value that
# is not of its form is ignored and named in `ignored`, and never an error of the request. All
# values are short and printable, so they can be logged.

CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE = "claude-code", "codex", "opencode", "qwen-code"
SDK, UNKNOWN = "sdk", "unknown"
HARNESSES = (CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE, SDK, UNKNOWN)
MAIN, SUBAGENT, COMPACTION = "main", "subagent", "compaction"
OF_SUBAGENTS = (SUBAGENT, "workflow")
SIDE_QUERY = "side_query"
OF_NO_AGENT = ("auxiliary", "side_reply", SIDE_QUERY)
"""What a harness sends beside its agents, such as for a title."""
REQUEST_CLASSES = (MAIN, *OF_SUBAGENTS, COMPACTION, *OF_NO_AGENT)
MOST_DURATIONS = 32
_MOST_DURATION_BYTES, _MOST_METADATA_BYTES = 4096, 8192
_DAY_MS = 86_400_000
_CC, _OWN_CLASS = b"x-claude-code-", b"x-claude-1p-request-class"
# Each header of Claude Code's with a short word, and its field here.
_WORDS = tuple(
    (_CC + header, field)
    for header, field in (
        (b"request-class", "request_class"),
        (b"agent-id", "agent_id"),
        (b"agent-type", "agent_type"),
        (b"parent-agent-id", "parent_agent_id"),
        (b"prompt-id", "prompt_id"),
        (b"compaction", "compaction"),
        (b"context-compacted", "context_compacted"),
    )
)
_DURATIONS = _CC + b"prev-tool-durations"
_METADATA, _PARENT_THREAD = b"x-codex-turn-metadata", b"x-codex-parent-thread-id"
# A session's parent, and where its own id is.
_PARENT_SESSIONS = (
    (b"x-parent-session-id", b"x-session-id"),
    (b"x-dynamo-parent-session-id", b"x-dynamo-session-id"),
    (_PARENT_THREAD, b"thread-id"),
)
_BETAS, _SIDE_QUERY = b"anthropic-beta", b"claude-code-side-query-"
_EVICT, _HOUR = "prompt-caching-evict-", b"extended-cache-ttl-"
_AGENT_HINT = AGENT_HINT_HEADER.encode()
_WORD = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_.:/%@+-]{0,63}")
_DURATION = re.compile(rb"([^\x00-\x20\x7f-\xff;=]{1,128})=([0-9]{1,9})")
_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,2}")
# A program and its version: `claude-cli/2.1.330 (...)`, `Anthropic/Python 0.70.0`.
_PROGRAM = re.compile(
    rb"([A-Za-z][A-Za-z0-9_.@/-]{0,47}?)[/ ]v?([0-9][A-Za-z0-9.+-]{0,31})(?![^\s;,)])"
)
_OPENCODE = re.compile(rb"\b(opencode)/v?([0-9][A-Za-z0-9.+-]{0,31})")
# The beginnings of user agents in lower case.
_USER_AGENTS = (
    (b"claude-cli/", CLAUDE_CODE),
    (b"claude-code/", CLAUDE_CODE),
    (b"codex", CODEX),
    (b"opencode", OPENCODE),
    (b"qwencode/", QWEN_CODE),
)
_SDK_AGENTS = (b"anthropic/", b"asyncanthropic/", b"openai/", b"asyncopenai/", b"ai-sdk/", b"ai/")
# Headers that only one harness sends.
_OWN_HEADERS = (
    (b"x-claude-code-session-id", CLAUDE_CODE),
    (_OWN_CLASS, CLAUDE_CODE),
    (_METADATA, CODEX),
    (_PARENT_THREAD, CODEX),
    (b"x-opencode-session", OPENCODE),
    (b"x-opencode-client", OPENCODE),
)


class ClientFacts(NamedTuple):
    """What is known of a request's client; "" and () where nothing is.

    harness: one of HARNESSES. program, version: as its user agent names them.
    request_class: one of REQUEST_CLASSES: what the harness sends the request for.
    agent_id, parent_agent_id: of a sub-agent. agent_type: its kind, as the harness names it.
    prompt_id: equal for all requests that serve one prompt of the person.
    prev_tool_durations_ms: how long each tool ran whose result this request brings.
    compaction: which kind of compaction the request is. context_compacted: the kind after which it
        is the first.
    is_subagent: whether it is from an agent that another agent started.
    workload, entrypoint: what Claude Code was started for, and by what.
    session: equal for all agents of one session of the harness: the id that it states, or its
        hash (`session.shown_name`).
    own_class: what Claude Code calls the request for its vendor, such as `blocking-subagent`: the
        main agent waits for it.
    asks_hour: whether Claude Code says that its marks ask for an hour.
    ignored: the headers and fields that were not of their form.
    """

    harness: str = UNKNOWN
    program: str = ""
    version: str = ""
    request_class: str = ""
    agent_id: str = ""
    agent_type: str = ""
    parent_agent_id: str = ""
    prompt_id: str = ""
    prev_tool_durations_ms: tuple[tuple[str, int], ...] = ()
    compaction: str = ""
    context_compacted: str = ""
    is_subagent: bool = False
    workload: str = ""
    entrypoint: str = ""
    session: str = ""
    own_class: str = ""
    asks_hour: bool = False
    ignored: tuple[str, ...] = ()

    def known(self) -> dict[str, Any]:
        """What is known, by the names of the fields; for a log or an answer."""
        return {name: value for name, value in zip(self._fields, self, strict=True) if value}


NO_FACTS = ClientFacts()


def harness_of(headers: Mapping[bytes, bytes], billing: Mapping[str, str]) -> str:
    """One of HARNESSES.

    headers: names in lower case. billing: the fields of the stripped header line.
    """
    for name, harness in _OWN_HEADERS:
        if name in headers:
            return harness
    agent = headers.get(b"user-agent", b"")[:64].lower()
    for start, harness in _USER_AGENTS:
        if agent.startswith(start):
            return harness
    if "cc_version" in billing:
        return CLAUDE_CODE
    if headers.get(b"originator", b"").lower().startswith(b"codex"):
        return CODEX
    if b"opencode/" in agent:
        return OPENCODE
    return SDK if agent.startswith(_SDK_AGENTS) or b"x-stainless-lang" in headers else UNKNOWN


def read_headers(headers: Mapping[bytes, bytes]) -> ClientFacts:
    """What a request's headers say; names in lower case. Never raises."""
    harness = harness_of(headers, {})
    found: dict[str, str] = {}
    ignored: list[str] = []
    agent = headers.get(b"user-agent", b"")[:256]
    program = _PROGRAM.match(agent)
    if harness == OPENCODE and (own := _OPENCODE.search(agent)) is not None:
        program = own
    if program is not None:
        found["program"], found["version"] = (part.decode("ascii") for part in program.groups())
    durations: tuple[tuple[str, int], ...] = ()
    if harness == CLAUDE_CODE:
        for name, field in (*_WORDS, (_OWN_CLASS, "own_class")):
            if (raw := headers.get(name)) is not None:
                _take(found, field, raw.decode("latin-1"), name.decode(), ignored)
        if (raw := headers.get(_DURATIONS)) is not None:
            durations = _durations(raw)
            if not durations:
                ignored.append(_DURATIONS.decode())
    elif harness == CODEX and (raw := headers.get(_METADATA)) is not None:
        _take_metadata(found, raw, ignored)
    if not found.get("agent_id"):
        _take_parent(found, headers, ignored)
    if _AGENT_HINT in headers and _agent_hint(headers[_AGENT_HINT].decode("latin-1")) is None:
        ignored.append(AGENT_HINT_HEADER)
    request_class = found.pop("request_class", "")
    if request_class and request_class not in REQUEST_CLASSES:  # of a newer Claude Code
        ignored.append("x-claude-code-request-class")
        request_class = ""
    own_class = found.get("own_class", "")
    if not request_class and own_class in REQUEST_CLASSES:
        request_class = own_class
    if not request_class and harness == CLAUDE_CODE and _SIDE_QUERY in headers.get(_BETAS, b""):
        request_class = SIDE_QUERY
    is_subagent = request_class in OF_SUBAGENTS or bool(found.get("agent_id"))
    is_subagent = is_subagent or own_class.endswith(SUBAGENT)
    return ClientFacts(
        harness,
        request_class=request_class or (SUBAGENT if is_subagent else ""),
        prev_tool_durations_ms=durations,
        is_subagent=is_subagent,
        asks_hour=harness == CLAUDE_CODE and _HOUR in headers.get(_BETAS, b""),
        ignored=tuple(ignored),
        **found,
    )


def with_body(facts: ClientFacts, billing: Mapping[str, str], session: str = "") -> ClientFacts:
    """The facts with those of a body: the fields of its stripped header line, and the session's
    name. Never raises."""
    if not billing:
        return facts._replace(session=session) if session else facts
    found: dict[str, str] = {}
    ignored = list(facts.ignored)
    for name, field in (("cc_workload", "workload"), ("cc_entrypoint", "entrypoint")):
        if name in billing:
            _take(found, field, billing[name], name, ignored)
    harness, version = facts.harness, facts.version
    if (stated := billing.get("cc_version")) is not None:
        if harness in (SDK, UNKNOWN):
            harness, version = CLAUDE_CODE, ""
        # What follows the three numbers changes with the conversation.
        if (numbers := _VERSION.match(stated[:64])) is None:
            ignored.append("cc_version")
        elif harness == CLAUDE_CODE and not facts.program.startswith("claude"):
            version = numbers[0]
    is_subagent = facts.is_subagent or billing.get("cc_is_subagent") == "true"
    return facts._replace(
        harness=harness,
        version=version,
        request_class=facts.request_class or (SUBAGENT if is_subagent else ""),
        is_subagent=is_subagent,
        workload=found.get("workload", ""),
        entrypoint=found.get("entrypoint", ""),
        session=session,
        ignored=tuple(ignored),
    )


def read_client(headers: Mapping[bytes, bytes], billing: Mapping[str, str]) -> ClientFacts:
    """All facts of a request: of its headers and its stripped header line. Never raises."""
    return with_body(read_headers(headers), billing)


def _take(found: dict[str, str], field: str, value: str, name: str, ignored: list[str]) -> None:
    """Takes a value if it is a short word; `name` is ignored otherwise."""
    if _WORD.fullmatch(value):
        found[field] = value
    elif value:
        ignored.append(name)


def gives_cache_back(facts: ClientFacts, headers: Mapping[str, str]) -> bool:
    """Whether a request's prompt is not read again after its agent ends: it is from a
    sub-agent, with the beta that lets its cache go. `headers` has lower-case names."""
    return facts.is_subagent and _EVICT in headers.get(_BETAS.decode(), "")


def _take_parent(found: dict[str, str], headers: Mapping[bytes, bytes], ignored: list[str]) -> None:
    """Takes a sub-agent's id and its parent's, from the first pair of headers that states both."""
    for name, own in _PARENT_SESSIONS:
        if (raw := headers.get(name)) is not None and raw != headers.get(own):
            _take(found, "parent_agent_id", raw.decode("latin-1"), name.decode(), ignored)
            own_id = headers.get(own, b"").decode("latin-1")
            if found.get("parent_agent_id") and _WORD.fullmatch(own_id):
                found["agent_id"] = own_id
                return


def _durations(raw: bytes) -> tuple[tuple[str, int], ...]:
    """`Bash=34;Read=7`; () if it is not of this form."""
    items = raw.split(b";", MOST_DURATIONS) if len(raw) <= _MOST_DURATION_BYTES else []
    if len(items) > MOST_DURATIONS:
        return ()
    matches = [_DURATION.fullmatch(item.strip()) for item in items]
    found = [(match[1].decode("ascii"), int(match[2])) for match in matches if match is not None]
    return tuple(found) if len(found) == len(items) and _are_short(found) else ()


def _are_short(durations: Iterable[tuple[str, int]]) -> bool:
    return all(duration_ms <= 7 * _DAY_MS for _, duration_ms in durations)


def _take_metadata(found: dict[str, str], raw: bytes, ignored: list[str]) -> None:
    """Codex's turn: JSON, in which a thread of a sub-agent names its source and its parent."""
    name = _METADATA.decode()
    try:
        turn = orjson.loads(raw) if len(raw) <= _MOST_METADATA_BYTES else None
    except orjson.JSONDecodeError:
        turn = None
    if not isinstance(turn, dict):
        ignored.append(name)
        return
    texts = {key: value for key, value in turn.items() if isinstance(value, str)}
    _take(found, "prompt_id", texts.get("root_turn_id") or texts.get("turn_id", ""), name, ignored)
    kind, source = texts.get("request_kind", ""), texts.get("thread_source", "")
    is_subagent = source == SUBAGENT or "subagent_kind" in texts
    if is_subagent:
        _take(found, "agent_id", texts.get("thread_id", ""), name, ignored)
        _take(found, "parent_agent_id", texts.get("parent_thread_id", ""), name, ignored)
        _take(found, "agent_type", texts.get("subagent_kind", ""), name, ignored)
    if kind == COMPACTION:
        found["request_class"] = COMPACTION
    elif is_subagent:
        found["request_class"] = SUBAGENT
    elif source == "user" and kind == "turn":
        found["request_class"] = MAIN
