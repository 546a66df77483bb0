"""Which conversation a request belongs to, as its client says and as its prompt shows."""

from __future__ import annotations

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
_HINTS = (*SESSION_HEADERS, FINAL_HEADER, TENANT_HEADER, *PRIORITY_HEADERS)
_RAW = {name.encode(): name for name in _HINTS}


def session_key(headers: Mapping[str, str], body: Any, chain: Chain) -> int | None:
    """A number for the conversation, equal for all its turns; None if nothing tells it.

    A harness's id covers its sub-agents too, and two people may open with the same
    words: so the id and the first user message count together, or either alone.
    `headers` has lower-case names.
    """
    stated = stated_session(headers, body)
    if stated is None:
        return chain.session
    begun = 0 if chain.session is None else chain.session
    return xxhash.xxh3_128_intdigest(b"%032x" % begun + stated.encode("utf-8", "surrogatepass"))


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
