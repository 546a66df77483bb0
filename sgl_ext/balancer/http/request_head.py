"""A request's head, from its bytes: what was asked, how its body is framed, what else was said.

llhttp reads it, and reads strictly: CRLF and not LF, no folded lines, no length
beside a transfer coding and no second one. Added here is what a proxy needs on
top, so that the engine can never see another request than the balancer did:
HTTP/1.0 or 1.1 only, no transfer coding but `chunked` and that in HTTP/1.1
only, a target that is a path.

A client says nearly the same in each of its heads; what changes is the body's
length. So heads that were read are kept by their bytes without that number.
Two heads that differ in nothing but the digits of one well-formed
Content-Length line mean the same but for the length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus

import httptools

from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.routes import Route
from sgl_ext.requests.session import QUEUED_HEADER

# What belongs to one connection and not to the message (RFC 9110, section 7.6.1), and the
# length, which the next connection's framing says anew.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# A body arrives here decoded, answers are read here on their way, the caller's key is for the
# balancer alone, and only the balancer says what it has read.
_NOT_FOR_WORKERS = HOP_BY_HOP | {
    b"accept-encoding",
    b"authorization",
    b"content-encoding",
    b"expect",
    b"host",
    b"x-api-key",
    QUEUED_HEADER.encode(),
}
_VERSIONS = {b" HTTP/1.1": True, b" HTTP/1.0": False}
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
_MAX_KEPT = 1024


class RequestHead:
    """What a head says but for the body's length.

    `headers` are in order, names in lower case; `fields` are the same, the last
    of a name; neither has the length. `target` is the path with its query, as
    it came. `rejection` is set if the request cannot be served whatever its body.
    `tenant` is whose it is, where that is told by its key; "" otherwise.
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
        self.tenant = ""
        self.route: Route | None = None
        self.rejection: BalancerError | None = None

    def connection_names(self) -> frozenset[bytes]:
        """What the Connection header names: what it names is of this connection, too."""
        values = [value.lower() for name, value in self.headers if name == b"connection"]
        return frozenset(token.strip() for value in values for token in value.split(b","))

    def say(self, told: Mapping[str, str | None]) -> None:
        """Has headers say this and nothing else, whatever the client sent; None: none of it."""
        ours = {name.encode(): value for name, value in told.items()}
        kept = [header for header in self.headers if header[0] not in ours]
        added = [(n, v.encode("latin-1")) for n, v in ours.items() if v is not None]
        self.headers = kept + added
        self.fields = dict(self.headers)
        dropped = _NOT_FOR_WORKERS | self.connection_names()
        passed = [header for header in kept if header[0] not in dropped]
        self.upstream_lines = _lines(passed + added)


class RequestHeadCache:
    """Reads heads, and keeps the latest. `admit` sees each new one and may raise BalancerError."""

    def __init__(self, admit: Callable[[RequestHead], None]) -> None:
        self._admit = admit
        self._kept: dict[bytes, RequestHead] = {}

    def clear(self) -> None:
        """What was admitted has to be admitted anew."""
        self._kept.clear()

    def read(self, raw: bytes) -> tuple[RequestHead, int]:
        """The head with these bytes, up to and with the empty line, and its body's length.

        Raises BalancerError 400, naming what is wrong, if it is malformed.
        """
        match = _LENGTH.search(raw)
        if match is None:
            key, length = raw, 0
        else:
            start, end = match.span(1)
            key, length = raw[:start] + raw[end:], int(match[1])
        head = self._kept.get(key)
        if head is None:
            head, length = parse_head(raw)
            try:
                self._admit(head)
            except BalancerError as error:
                head.rejection = error
                return head, length
            if match is None and length:
                # A length in a spelling the pattern does not know is still in the key.
                return head, length
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = head
        return head, length


class _Parts:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, target: bytes) -> None:
        self.target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_head(raw: bytes) -> tuple[RequestHead, int]:
    """As `Heads.read`, without any memory."""
    parts = _Parts()
    parser = httptools.HttpRequestParser(parts)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        # An offer, declined by not answering it; CONNECT has no path and fails below.
        pass
    except httptools.HttpParserError as error:
        raise _bad(str(error)) from None
    if not parts.complete:
        raise _bad("the head is cut")
    line_end = raw.index(b"\r\n")
    version = _VERSIONS.get(raw[line_end - 9 : line_end])
    if version is None:
        raise _bad("the version must be HTTP/1.1 or HTTP/1.0")
    head = RequestHead()
    head.http_1_1 = version
    head.method = parser.get_method().decode("ascii")
    head.target = _origin_form(parts.target)
    head.path = head.target.partition(b"?")[0].decode("ascii")
    length = int(dict(parts.headers).get(b"content-length", 0))
    head.headers = [header for header in parts.headers if header[0] != b"content-length"]
    head.fields = dict(head.headers)
    _read_fields(head)
    return head, length


def _read_fields(head: RequestHead) -> None:
    fields = head.fields
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or not head.http_1_1:
            raise _bad("transfer-encoding: only chunked, and only in HTTP/1.1")
        head.chunked = True
    expected = fields.get(b"expect", b"").lower()
    head.expects_continue = head.http_1_1 and expected == b"100-continue"
    media_type = fields.get(b"content-type", b"application/octet-stream").partition(b";")[0]
    head.content_type = media_type.strip().lower().decode("latin-1")
    connection_names = head.connection_names()
    head.keep_alive = b"close" not in connection_names and (
        head.http_1_1 or b"keep-alive" in connection_names
    )
    dropped = _NOT_FOR_WORKERS | connection_names
    head.upstream_lines = _lines([h for h in head.headers if h[0] not in dropped])


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def _origin_form(target: bytes) -> bytes:
    """A target as path and query. An absolute URL is one, too; every server must take it."""
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
