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
    """A number for the conversation, equal for all its turns; None if it is unknown.

    A harness has one id for all its sub-agents, and two people may begin with the same words. So
    the key is made of the stated id, the sub-agent's id and the first user message, or of those
    that there are. Two cache groups never have the same key. `headers` has lower-case names.
    """
    stated = stated_session(headers, body)
    if stated is None:
        return chain.session
    for name in AGENT_HEADERS:
        if (agent := headers.get(name)) and agent != stated:
            stated = f"{stated}/{agent}"
    begun = 0 if chain.session is None else chain.session
    key = b"%032x" % begun + stated.encode("utf-8", "surrogatepass")
    if salt := salt_of(headers):
        key = b"%d:%b%b" % (len(salt), salt, key)
    return xxhash.xxh3_128_intdigest(key)


def stated_session(headers: Mapping[str, str], body: Any) -> str | None:
    """The id that the client states for the conversation, or for the harness's session."""
    stated = None
    if headers:
        stated = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
    if stated is None and isinstance(body, dict):
        key = body.get("prompt_cache_key")
        stated = key if isinstance(key, str) and key else None
    return stated


def session_hash(headers: Mapping[str, str], body: Any) -> str:
    """Equal for all agents of one session of a harness; "" if it states no id. It quotes nothing,
    and two cache groups never have the same."""
    stated = stated_session(headers, body)
    if stated is None:
        return ""
    salted = salt_of(headers) + b"\xff" + stated.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_hexdigest(salted)


def hints_of(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers that are hints, from a request's raw headers; names in lower case."""
    return {name: fields[raw].decode("latin-1") for raw, name in _RAW.items() if raw in fields}


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the client states that this is the conversation's last turn."""
    final = headers.get(FINAL_HEADER)
    return final is not None and final.strip().lower() in ("1", "true", "yes")
