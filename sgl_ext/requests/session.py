"""The conversation and the tenant that a request belongs to."""

import re
from collections.abc import Mapping
from typing import Any

import xxhash

from sgl_ext.requests.default_hints import DEFAULTS_HEADER
from sgl_ext.requests.priority import HEADERS as PRIORITY_HEADERS
from sgl_ext.requests.segments import Chain

# The headers of agent harnesses; our own has precedence.
SESSION_HEADERS = (
    "x-sgl-ext-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
)
# A harness has one id for all its agents; these tell its sub-agents apart.
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")
# What a harness sends the request for. Of these classes it is its lead's, whose id is no header.
CLASS_HEADER = "x-claude-code-request-class"
_OF_LEADS = ("main", "compaction")
# A name that a log holds as it is.
_SHOWN = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")
FINAL_HEADER = "x-sgl-ext-session-final"
TENANT_HEADER = "x-tenant-id"
TENANT_NAME = re.compile(r"^[!-~]([ -~]{0,254}[!-~])?\Z")
"""A name is printable ASCII, as it is the value of a header, and short: tables have it as key."""
# Requests of one group share cached prefixes. The balancer sets it if tenants must not share.
GROUP_HEADER = "x-sgl-ext-cache-group"
# The tenant whose pins and sessions a request may see and change. The balancer sets it on every
# request without an operator's key.
OWNER_HEADER = "x-sgl-ext-owner"
# Seconds that the balancer held a request back before it sent it to the engine.
QUEUED_HEADER = "x-sgl-ext-queued-s"
# How long a window of its queue was then (`scheduler.order`).
WINDOW_HEADER = "x-sgl-ext-window-s"
# What a request is for, if it is not the first attempt of a client's own: "retry-1", "standby".
PURPOSE_HEADER = "x-sgl-ext-purpose"
# The data-parallel rank of the engine that the balancer chose.
RANK_HEADER = "x-sgl-ext-rank"
# How many ranks an engine has, in its answers to readiness probes.
RANKS_HEADER = "x-sgl-ext-ranks"
# With prefill and decode engines: where the KV of this request is handed over, `HOST PORT ROOM`.
BOOTSTRAP_HEADER = "x-sgl-ext-bootstrap"
# What such an engine does, in its answers to readiness probes: `prefill PORT` or `decode`.
ROLE_HEADER = "x-sgl-ext-role"
# Proves to an engine that a request is from its balancer.
SECRET_HEADER = "x-sgl-ext-engine-secret"
# What an engine answers in it to a request that does not prove that.
REFUSED = b"refused"
INTERNAL_HEADERS = (
    TENANT_HEADER,
    GROUP_HEADER,
    OWNER_HEADER,
    PURPOSE_HEADER,
    QUEUED_HEADER,
    WINDOW_HEADER,
    RANK_HEADER,
    BOOTSTRAP_HEADER,
    DEFAULTS_HEADER,
    SECRET_HEADER,
)
"""What an engine believes from its balancer alone."""
_HINTS = (
    *SESSION_HEADERS,
    *AGENT_HEADERS,
    CLASS_HEADER,
    FINAL_HEADER,
    TENANT_HEADER,
    GROUP_HEADER,
    *PRIORITY_HEADERS,
)
_RAW = {name.encode(): name for name in _HINTS}


def salt_of(headers: Mapping[str, str]) -> bytes:
    """A salt that keeps the segments and conversations of different cache groups distinct."""
    group = headers.get(GROUP_HEADER)
    return b"" if group is None else b"g" + group.encode("utf-8", "surrogatepass")


def session_key(headers: Mapping[str, str], body: Any, chain: Chain) -> int | None:
    """A number for an agent's conversation, equal for all its turns; None if it is unknown.

    The id that the client states decides, with the agent's id if one is stated. The system text
    and the tools may change then. A harness has one id for all its agents. Those of its agents
    that state no id are told apart by their first user message. If no id is stated, everything
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


def thread_key(key: int | None, chain: Chain) -> int | None:
    """A number for the turns of a conversation that begin alike: another system text is another
    thread. key: of the conversation (`session_key`)."""
    if key is None or chain.session is None or key == chain.session:
        return key
    return xxhash.xxh3_128_intdigest(b"%032x%032x" % (key, chain.session))


def _key(headers: Mapping[str, str], *parts: bytes) -> int:
    """The hash of parts, none of which has the byte 0xFF: no text in UTF-8 has it."""
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
    return {name: fields[raw].decode("latin-1") for raw, name in _RAW.items() if raw in fields}


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the client states that this is the conversation's last turn."""
    final = headers.get(FINAL_HEADER)
    return final is not None and final.strip().lower() in ("1", "true", "yes")
