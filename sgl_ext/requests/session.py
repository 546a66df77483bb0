"""Which conversation a request belongs to, as its client says and as its prompt shows, and
whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import xxhash

from sgl_ext.requests.priority import HEADERS as PRIORITY_HEADERS
from sgl_ext.requests.segments import Chain

# The headers of agent harnesses, ours first.
SESSION_HEADERS = (
    "x-sgl-ext-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
)
FINAL_HEADER = "x-sgl-ext-session-final"
TENANT_HEADER = "x-tenant-id"
TENANT_NAME = re.compile(r"^[!-~]([ -~]*[!-~])?\Z")
"""A name is printable ASCII, as it is the value of a header."""
# With whom a request shares cached prefixes; the balancer sets it where tenants are kept apart.
GROUP_HEADER = "x-sgl-ext-cache-group"
# Whose things alone a request is to see and to touch; the balancer sets it for who is no operator.
OWNER_HEADER = "x-sgl-ext-owner"
# Seconds that the balancer held a request back before it sent it to the engine.
QUEUED_HEADER = "x-sgl-ext-queued-s"
_HINTS = (*SESSION_HEADERS, FINAL_HEADER, TENANT_HEADER, GROUP_HEADER, *PRIORITY_HEADERS)
_RAW = {name.encode(): name for name in _HINTS}


def salt_of(headers: Mapping[str, str]) -> bytes:
    """What parts a request's segments and conversations from those of other cache groups."""
    group = headers.get(GROUP_HEADER)
    return b"" if group is None else b"g" + group.encode("utf-8", "surrogatepass")


def session_key(headers: Mapping[str, str], body: Any, chain: Chain) -> int | None:
    """A number for the conversation, equal for all its turns; None if nothing tells it.

    A harness's id covers its sub-agents too, and two people may open with the same
    words: so the id and the first user message count together, or either alone. Those of
    two cache groups are never equal. `headers` has lower-case names.
    """
    stated = stated_session(headers, body)
    if stated is None:
        return chain.session
    begun = 0 if chain.session is None else chain.session
    told = b"%032x" % begun + stated.encode("utf-8", "surrogatepass")
    if salt := salt_of(headers):
        told = b"%d:%b%b" % (len(salt), salt, told)
    return xxhash.xxh3_128_intdigest(told)


def stated_session(headers: Mapping[str, str], body: Any) -> str | None:
    """What the client calls the conversation, or the harness's session it belongs to."""
    stated = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
    if stated is None and isinstance(body, dict):
        key = body.get("prompt_cache_key")
        stated = key if isinstance(key, str) and key else None
    return stated


def hints_of(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers read here, out of a request's raw ones; names in lower case."""
    return {name: fields[raw].decode("latin-1") for raw, name in _RAW.items() if raw in fields}


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the client says that no further turn will come."""
    return headers.get(FINAL_HEADER, "").strip().lower() in ("1", "true", "yes")
