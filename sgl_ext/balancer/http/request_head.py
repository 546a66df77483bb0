"""A request's head: its parsed form, and a cache of parsed heads.

llhttp parses it strictly: CRLF and not LF, no folded lines, no length beside a transfer coding and
no second length. Rules are added here so that an engine can never see another request than the
balancer did: only HTTP/1.0 and 1.1, no transfer coding but `chunked` and that only in HTTP/1.1,
a target that is a path without a fragment, one Host and one Content-Type, and no header that is
read here but, as one of the connection, not sent on.

A client's heads are nearly equal; only the length of the body changes. So parsed heads are cached
by their bytes without the digits of the length. Two heads that differ only in the digits of one
well-formed Content-Length line mean the same except for the length.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
import xxhash

from sgl_ext.balancer.http.body_codings import ENCODINGS
from sgl_ext.key_file import ApiKey
from sgl_ext.limits.bounds import MAX_BODILESS_BYTES
from sgl_ext.protocols import request_ids
from sgl_ext.protocols.errors import BalancerError, body_too_large
from sgl_ext.protocols.registry import errors_of
from sgl_ext.protocols.request_ids import TraceContext, read_trace
from sgl_ext.protocols.routes import Route
from sgl_ext.reading.client import ClientFacts, hints_of, read_headers
from sgl_ext.reading.protocol import ErrorShape
from sgl_ext.wire.headers import OF_REQUESTS

_ID = request_ids.HEADER.encode()
_PARENT, _STATE = (name.encode() for name in request_ids.TRACE_HEADERS)
_IDENTITY = frozenset({_ID, _PARENT, _STATE})
"""The headers that an engine gets from the balancer alone, after they were checked."""


class Identity(NamedTuple):
    """request_id: the client's, "" if it has none. trace: the client's.

    replaced: the headers that were invalid, so that the balancer's own values take their place.
    """

    request_id: str = ""
    trace: TraceContext | None = None
    replaced: tuple[str, ...] = ()


NO_IDENTITY = Identity()


def read_identity(headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> Identity:
    """The identity that a head states. Headers whose names may not be repeated are invalid if they
    are."""
    if _IDENTITY.isdisjoint(fields):
        return NO_IDENTITY
    replaced: list[str] = []
    request_id, trace = _one(headers, _ID), None
    if _ID in fields and not request_ids.is_valid_id(request_id):
        request_id = ""
        replaced.append(request_ids.HEADER)
    if _PARENT in fields:
        state = ",".join([v.decode("latin-1") for name, v in headers if name == _STATE])
        trace = read_trace(_one(headers, _PARENT), state)
        if trace is None:
            replaced.append(request_ids.TRACE_HEADERS[0])
        elif state and not trace.state:
            replaced.append(request_ids.TRACE_HEADERS[1])
    return Identity(request_id, trace, tuple(replaced))


def _one(headers: list[tuple[bytes, bytes]], name: bytes) -> str:
    values = [value for n, value in headers if n == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


# Headers of one connection and not of the message (RFC 9110, section 7.6.1), and the length,
# which is stated again by the framing of the next connection.
HOP_BY_HOP = frozenset(
    b"connection content-length keep-alive proxy-authenticate proxy-authorization "
    b"proxy-connection te trailer transfer-encoding upgrade".split()
)
# Bodies are decoded here, responses must stay readable here, the key is for the balancer alone,
# and only the balancer sets its internal headers and names the request.
_NOT_UPSTREAM = (
    HOP_BY_HOP
    | _IDENTITY
    | {
        b"accept-encoding",
        b"authorization",
        b"content-encoding",
        b"expect",
        b"host",
        b"x-api-key",
    }
    | {name.encode() for name in OF_REQUESTS}
)
_NO_CODING = b"identity"
_WITH_BODY = ("POST", "PUT", "PATCH")
LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
# Headers that decide on the answer besides the hints.
_DECIDING = (b"anthropic-version", b"anthropic-beta", b"accept", b"x-sgl-ext-context")
_MAX_CACHED = 1024
# A longer head is parsed each time, so that the cache stays small.
_MAX_CACHED_BYTES = 4096


class RequestHead:
    """A request's head, without the body's length.

    headers: in order, with lower-case names, without those that the Connection header names.
    fields: the same, the last of each name.
    target: the path and query as they arrived.
    upstream_lines: the header lines for the worker.
    begun: how its last request began, and the first lines of that worker's (`ConnectionPool`).
    identity: the id and the trace that the client states.
    tenant: the tenant that authentication found; "" otherwise.
    key: the key that it found in the key file.
    derived: what `keep` was given; None before that.
    is_socket: whether it opens a WebSocket.
    rejection: set if the request cannot be served whatever its body.
    """

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.path = ""
        self.http_1_1 = True
        self.keep_alive = True
        self.headers: list[tuple[bytes, bytes]] = []
        self.fields: dict[bytes, bytes] = {}
        self.chunked = False
        self.expects_continue = False
        self.content_type = ""
        self.upstream_lines = b""
        self.begun: tuple[bytes | None, bytes] = (None, b"")
        self.identity: Identity = NO_IDENTITY
        self.tenant = ""
        self.key: ApiKey | None = None
        self.route: Route | None = None
        self.is_socket = False
        self.derived: Any = None
        self.rejection: BalancerError | None = None
        self.is_complete = False

    @cached_property
    def hints(self) -> dict[str, str]:
        """The headers that are hints; names in lower case."""
        return hints_of(self.fields)

    @cached_property
    def facts(self) -> ClientFacts:
        """What the headers say of the client. It is read once for all requests with this head."""
        return read_headers(self.fields)

    @cached_property
    def resend_hash(self) -> "xxhash.xxh3_128":
        """The hash of what a request's head shares with that of the request when it is sent again;
        `hints` include the session. Copy it before you update it."""
        hints = "".join(f"\n{name}: {value}" for name, value in sorted(self.hints.items()))
        found = xxhash.xxh3_128(f"{self.method}\n{self.tenant}{hints}\n".encode())
        found.update(self.target)
        for name in _DECIDING:
            found.update(b"\n%b" % self.fields.get(name, b""))
        found.update(b"\n\n")
        return found

    def body_limit(self, size_bytes: int, max_bytes: int) -> int:
        """The most bytes that the body may have, whose stated length this is. Raises BalancerError
        413."""
        limit = max_bytes if self.method in _WITH_BODY else min(max_bytes, MAX_BODILESS_BYTES)
        if size_bytes > limit:
            raise body_too_large(limit)
        return limit

    @cached_property
    def encoding(self) -> bytes:
        """The one coding of the body; b"" if it has none. Raises BalancerError 415."""
        stated = self.fields.get(b"content-encoding", b"")
        codings = [each for each in map(bytes.strip, stated.lower().split(b",")) if each]
        codings = [each for each in codings if each != _NO_CODING]
        unknown = next((each for each in codings if each not in ENCODINGS), None)
        if unknown is not None:
            message = f"must be gzip, deflate, zstd or identity, not {unknown.decode('latin-1')!r}"
        elif len(codings) > 1:
            message = f"must be one coding, not {stated.decode('latin-1')!r}"
        else:
            return codings[0] if codings else b""
        raise BalancerError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-encoding: {message}")

    @cached_property
    def errors(self) -> ErrorShape:
        """How errors of its path are worded."""
        return errors_of(self.path)

    def keep(self, derived: object) -> None:
        """Keeps what was made of this head for all requests with it. That must depend on the head
        and the settings alone: when these change, the cache of heads is emptied."""
        self.derived = derived

    # The parser calls these.

    def on_url(self, target: bytes) -> None:
        self.target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.is_complete = True

    def set_headers(self, headers: Mapping[str, str | None]) -> None:
        """Replaces headers, whatever the client sent; None removes one."""
        ours = {name.encode(): value for name, value in headers.items()}
        theirs = [header for header in self.headers if header[0] not in ours]
        added = [(n, v.encode("latin-1")) for n, v in ours.items() if v is not None]
        self.headers = theirs + added
        self.fields = dict(self.headers)
        self.__dict__.pop("hints", None)
        self.__dict__.pop("resend_hash", None)
        self.begun = None, b""
        self.upstream_lines = header_lines(theirs, _NOT_UPSTREAM) + header_lines(added, ())


class RequestHeadCache:
    """Parses heads and caches the latest. `admit` gets each new one and may raise BalancerError."""

    limit = _MAX_CACHED

    def __init__(self, admit: Callable[[RequestHead], None]) -> None:
        self._admit = admit
        self._cached: dict[bytes | tuple[bytes], RequestHead] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def clear(self) -> None:
        """Empties the cache, so that every head is admitted again."""
        self._cached.clear()

    def read(self, raw: bytes) -> tuple[RequestHead, int]:
        """The head of these bytes, which include the empty line, and its body's length.

        Raises BalancerError 400, naming the fault, if it is malformed.
        """
        match = LENGTH.search(raw)
        key: bytes | tuple[bytes]
        if match is None:
            # Not bytes: with an empty length it would be the key of one with digits.
            key, length = (raw,), 0
        else:
            start, end = match.span(1)
            key, length = raw[:start] + raw[end:], int(match[1])
        head = self._cached.get(key)
        if head is None:
            head, length = parse_head(raw)
            try:
                self._admit(head)
            except BalancerError as error:
                head.rejection = error
                return head, length
            if match is None and length:
                # The key contains a length whose spelling the pattern does not match.
                return head, length
            if len(raw) > _MAX_CACHED_BYTES or head.identity is not NO_IDENTITY or head.is_socket:
                return head, length  # one with an id or a handshake's key never comes again
            if len(self._cached) >= self.limit:
                self._cached.clear()
            self._cached[key] = head
        return head, length


def parse_head(raw: bytes) -> tuple[RequestHead, int]:
    """As `RequestHeadCache.read`, without the cache."""
    if raw.startswith((b"\r", b"\n")):  # the parser would skip it
        raise _bad("a line end that is not CRLF")
    head = RequestHead()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        # Another upgrade than to a WebSocket is declined by ignoring it; CONNECT has no path and
        # fails below.
        pass
    except httptools.HttpParserError as error:
        raise _bad(str(error)) from None
    if not head.is_complete:
        raise _bad("the head is cut")
    start = b"%b %b HTTP/1." % (parser.get_method(), head.target)
    version = raw[: raw.index(b"\r\n")].removeprefix(start)
    if version not in (b"1", b"0"):
        raise _bad("the first line must be a method, a target, and HTTP/1.1 or HTTP/1.0")
    head.http_1_1 = version == b"1"
    head.method = parser.get_method().decode("ascii")
    head.target = _origin_form(head.target)
    head.path = head.target.partition(b"?")[0].decode("ascii")
    length = int(dict(head.headers).get(b"content-length", 0))
    coding = transfer_coding(head.headers)
    if coding is not None:
        if coding != b"chunked" or not head.http_1_1:
            raise _bad("transfer-encoding: only chunked, and only in HTTP/1.1")
        head.chunked = True
    names = [name for name, _ in head.headers]
    for once in (b"host", b"content-type"):  # servers differ in which of two they read
        if names.count(once) > 1:
            raise _bad(f"{once.decode()}: given twice")
    options = connection_options(head.headers)
    head.keep_alive = b"close" not in options and (head.http_1_1 or b"keep-alive" in options)
    if b"upgrade" in options and head.http_1_1 and head.method == "GET":
        head.is_socket = dict(head.headers).get(b"upgrade", b"").lower() == b"websocket"
    unread = options - {b"connection", b"host"} | {b"content-length"}
    head.headers = [header for header in head.headers if header[0] not in unread]
    head.fields = fields = dict(head.headers)
    expected = fields.get(b"expect", b"").lower()
    head.expects_continue = head.http_1_1 and expected == b"100-continue"
    media_type = fields.get(b"content-type", b"application/octet-stream").partition(b";")[0]
    head.content_type = media_type.strip().lower().decode("latin-1")
    head.upstream_lines = header_lines(head.headers, _NOT_UPSTREAM)
    head.identity = read_identity(head.headers, fields)
    return head, length


def connection_options(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """What Connection headers state: `close`, `keep-alive`, and names of headers that are of the
    connection, too."""
    values = [value.lower() for name, value in headers if name == b"connection"]
    return frozenset(token.strip() for value in values for token in value.split(b","))


def transfer_coding(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """All transfer codings, in lower case; None if there are none."""
    values = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    return b", ".join(values) if values else None


def header_lines(headers: list[tuple[bytes, bytes]], dropped: Collection[bytes]) -> bytes:
    """Headers as they are sent, without the dropped names."""
    return b"".join([b"%b: %b\r\n" % header for header in headers if header[0] not in dropped])


def _origin_form(target: bytes) -> bytes:
    """A target as path and query. Every server must accept an absolute URL, too."""
    if b"#" in target:
        raise _bad("the target has a fragment")
    if target.startswith(b"/"):
        return target
    if target.lower().startswith(b"http://"):
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError:
            raise _bad("the target is no URL") from None
        path = url.path or b"/"
        return path if url.query is None else b"%b?%b" % (path, url.query)
    raise _bad("the target must be a path")


def _bad(reason: str) -> BalancerError:
    return BalancerError(HTTPStatus.BAD_REQUEST, f"Malformed HTTP request: {reason}.")
