"""The headers of our own with which a balancer sends requests to its engines.

    balancer --> engine     tenant, group, owner     whose request it is
                            purpose, queued, window  why it comes, and how long it waited
                            rank, bootstrap          where it runs, and where its KV goes
                            conversation             which HTTP process of the engine has its caches
                            default hints            what the operator gives it
                            secret                   proves all of these
    engine --> balancer     secret: refused          the request is not proved to be a balancer's

An engine believes INTERNAL_HEADERS from its balancer alone (`sgl_ext.engine.http.secret`). A
balancer sends none of them on that a client sent, but the tenant of a proxy that it trusts. A
malformed value counts as none, and is no error: it can only be from a balancer of another version.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

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
# The number of the request's conversation: of an engine's HTTP processes, one has its caches.
CONVERSATION_HEADER = "x-sgl-ext-conversation"
# With prefill and decode engines: where the KV of this request is handed over, `HOST PORT ROOM`.
BOOTSTRAP_HEADER = "x-sgl-ext-bootstrap"
# The operator's default hints for the request, as JSON.
DEFAULTS_HEADER = "x-sgl-ext-default-hints"
# Where another model answers than the one that the client named: its name.
MODEL_HEADER = "x-sgl-ext-model"
# Which of a request's hints count, by their names.
HINTS_HEADER = "x-sgl-ext-hints"
OF_ANSWERS = (MODEL_HEADER, HINTS_HEADER)
"""What a balancer says to a client, and to no engine."""
# Proves to an engine that a request is from its balancer.
SECRET_HEADER = "x-sgl-ext-engine-secret"
# What an engine answers in it to a request that does not prove that.
REFUSED = b"refused"

OF_REQUESTS = (
    PURPOSE_HEADER,
    QUEUED_HEADER,
    WINDOW_HEADER,
    RANK_HEADER,
    CONVERSATION_HEADER,
    BOOTSTRAP_HEADER,
    DEFAULTS_HEADER,
    SECRET_HEADER,
)
"""What a balancer never sends on from a client."""
INTERNAL_HEADERS = (TENANT_HEADER, GROUP_HEADER, OWNER_HEADER, *OF_REQUESTS)
"""What an engine believes from its balancer alone."""

MAX_QUEUED_S = 3600.0
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_PURPOSE = re.compile(r"[a-z]{1,12}(-[0-9]{1,3})?")
_BOOTSTRAP = re.compile(r"([!-~]+) ([0-9]{1,5}) ([0-9]{1,18})")


def header_line(name: str, value: bytes) -> bytes:
    """A header as a line of a request's head."""
    return b"%b: %b\r\n" % (name.encode(), value)


_QUEUED_LINES = header_line(QUEUED_HEADER, b"%.3f") + header_line(WINDOW_HEADER, b"%.3f")
_RETRY_LINE = header_line(PURPOSE_HEADER, b"retry-%d")
_CONVERSATION_LINE = header_line(CONVERSATION_HEADER, b"%x")
_RANK_LINE = header_line(RANK_HEADER, b"%d")
_BOOTSTRAP_LINE = header_line(BOOTSTRAP_HEADER, b"%b %d")
REFUSED_LINE = header_line(SECRET_HEADER, REFUSED)


def queued_lines(queued_s: float, window_s: float) -> bytes:
    """How long a request waited in the balancer's queue, and how long a window of that was."""
    return _QUEUED_LINES % (queued_s, window_s)


def read_seconds(headers: Mapping[str, str], name: str) -> float | None:
    """What QUEUED_HEADER or WINDOW_HEADER states, at most MAX_QUEUED_S; 0 if it is not there, None
    if it is malformed."""
    stated = headers.get(name)
    if stated is None:
        return 0.0
    return min(float(stated), MAX_QUEUED_S) if _SECONDS.fullmatch(stated) else None


def conversation_line(number: int | None) -> bytes:
    """Which conversation the request is a turn of; nothing if that is unknown."""
    return b"" if number is None else _CONVERSATION_LINE % number


def retry_line(number: int) -> bytes:
    """That so many engines have failed with the request before."""
    return _RETRY_LINE % number


def read_purpose(headers: Mapping[str, str]) -> str:
    """What a balancer sends a request for, "" for the first attempt of a client's own."""
    stated = headers.get(PURPOSE_HEADER, "")
    return stated if _PURPOSE.fullmatch(stated) else ""


def rank_line(rank: int) -> bytes:
    """The data-parallel rank that runs the request."""
    return _RANK_LINE % rank


class Bootstrap(NamedTuple):
    """Where a prefill engine hands the KV of a request to a decode engine."""

    host: str
    port: int
    room: int


def bootstrap_line(address: str, room: int) -> bytes:
    """The line that both engines get. address: that of the prefill engine, `HOST PORT`."""
    return _BOOTSTRAP_LINE % (address.encode(), room)


def read_bootstrap(headers: Mapping[str, str]) -> Bootstrap | None:
    """None if one engine both prefills and decodes."""
    stated = _BOOTSTRAP.fullmatch(headers.get(BOOTSTRAP_HEADER, ""))
    return None if stated is None else Bootstrap(stated[1], int(stated[2]), int(stated[3]))


class DefaultHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Default hints; None where there is no default. ttl_s: 0 pins no prompt without marks."""

    priority: int | None = None
    osl: int | None = None
    prefill: bool | None = None
    ttl_s: float | None = None

    def over(self, others: "DefaultHints") -> "DefaultHints":
        """These hints, and those of `others` where there are none of these."""
        return DefaultHints(
            self.priority if self.priority is not None else others.priority,
            self.osl if self.osl is not None else others.osl,
            self.prefill if self.prefill is not None else others.prefill,
            self.ttl_s if self.ttl_s is not None else others.ttl_s,
        )


NO_DEFAULTS = DefaultHints()


def defaults_line(hints: DefaultHints) -> bytes:
    """The operator's default hints for a request."""
    return header_line(DEFAULTS_HEADER, msgspec.json.encode(hints))


def read_defaults(headers: Mapping[str, str]) -> DefaultHints:
    """The default hints of a request, if there are any. Raises ValueError if they are malformed."""
    stated = headers.get(DEFAULTS_HEADER)
    return NO_DEFAULTS if stated is None else msgspec.json.decode(stated, type=DefaultHints)
