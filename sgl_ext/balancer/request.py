"""A request's head, from its bytes: what was asked, how its body is framed, what else was said.

llhttp reads it, and reads strictly: one blank behind nothing, CRLF and not LF,
no folded lines, no length beside a transfer coding and no second one. Added
here is what a proxy needs on top, so that the engine can never see another
request than the balancer did: HTTP/1.0 or 1.1 only, no transfer coding but
`chunked` and that in HTTP/1.1 only, a target that is a path.
"""

from __future__ import annotations

from http import HTTPStatus

import httptools

from sgl_ext.balancer.errors import BalancerError
from sgl_ext.balancer.routes import Route

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
# A body arrives here decoded, answers are read here on their way, and the caller's key is for
# the balancer alone.
_NOT_FOR_WORKERS = HOP_BY_HOP | {
    b"accept-encoding",
    b"authorization",
    b"content-encoding",
    b"expect",
    b"host",
    b"x-api-key",
}
_VERSIONS = {b" HTTP/1.1": True, b" HTTP/1.0": False}


class Request:
    """One request. Complete once a reader hands it out; until then it has no body.

    `headers` are in order, names in lower case; `fields` are the same, the last
    of a name. `target` is the path with its query, as it came. With a `refusal`
    the body was not kept, and with `unread` not even read to its end, so the
    connection cannot go on behind it.
    """

    __slots__ = (
        "_headers_complete",
        "body",
        "chunked",
        "content_length",
        "expects_continue",
        "fields",
        "headers",
        "http_1_1",
        "keep_alive",
        "method",
        "path",
        "refusal",
        "route",
        "target",
        "unread",
    )

    def __init__(self) -> None:
        self._headers_complete = False
        self.method = ""
        self.target = b""
        self.path = ""
        self.http_1_1 = True
        self.keep_alive = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.fields: dict[bytes, bytes] = {}
        self.content_length = 0
        self.chunked = False
        self.expects_continue = False
        self.body: bytes | bytearray = b""
        self.route: Route | None = None
        self.refusal: BalancerError | None = None
        self.unread = False

    @property
    def content_type(self) -> str:
        """The media type alone, in lower case."""
        value = self.fields.get(b"content-type", b"application/octet-stream")
        return value.partition(b";")[0].strip().lower().decode("latin-1")

    def lines_for_workers(self) -> bytes:
        """The header lines that go on to a worker, without those of this connection."""
        dropped = _NOT_FOR_WORKERS
        if b"connection" in self.fields:
            dropped = dropped | self._nominated()
        return b"".join(
            [b"%b: %b\r\n" % header for header in self.headers if header[0] not in dropped]
        )

    def _nominated(self) -> frozenset[bytes]:
        """What the Connection header names: of this connection too."""
        values = [value.lower() for name, value in self.headers if name == b"connection"]
        return frozenset(token.strip() for value in values for token in value.split(b","))

    # The parser calls these.

    def on_url(self, target: bytes) -> None:
        self.target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._headers_complete = True


def parse_head(head: bytes) -> Request:
    """The request whose head this is, up to and with its empty line.

    Raises BalancerError 400, naming what is wrong.
    """
    request = Request()
    parser = httptools.HttpRequestParser(request)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        # An offer that is declined by not answering it; CONNECT has no path and fails below.
        pass
    except httptools.HttpParserError as error:
        raise _bad(str(error)) from None
    if not request._headers_complete:
        raise _bad("the head is cut")
    line_end = head.index(b"\r\n")
    version = _VERSIONS.get(head[line_end - 9 : line_end])
    if version is None:
        raise _bad("the version must be HTTP/1.1 or HTTP/1.0")
    request.http_1_1 = version
    request.method = parser.get_method().decode("ascii")
    _set_target(request)
    fields = request.fields = dict(request.headers)
    _set_framing(request, fields)
    request.keep_alive = request.http_1_1
    if b"connection" in fields:
        said = request._nominated()
        wanted = request.http_1_1 or b"keep-alive" in said
        request.keep_alive = wanted and b"close" not in said
    return request


def _set_target(request: Request) -> None:
    if not request.target.startswith(b"/"):
        request.target = _origin_form(request.target)
    request.path = request.target.partition(b"?")[0].decode("ascii")


def _origin_form(target: bytes) -> bytes:
    """The path and query of an absolute URL, which every server must take."""
    if target.lower().startswith(b"http://"):
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError:
            raise _bad("the target is no URL") from None
        path = url.path or b"/"
        return path if url.query is None else b"%b?%b" % (path, url.query)
    raise _bad("the target must be a path")


def _set_framing(request: Request, fields: dict[bytes, bytes]) -> None:
    request.content_length = int(fields.get(b"content-length", 0))
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or not request.http_1_1:
            raise _bad("transfer-encoding: only chunked, and only in HTTP/1.1")
        request.chunked = True
    expected = fields.get(b"expect")
    request.expects_continue = (
        expected is not None and request.http_1_1 and expected.lower() == b"100-continue"
    )


def _bad(reason: str) -> BalancerError:
    return BalancerError(HTTPStatus.BAD_REQUEST, f"Malformed HTTP request: {reason}.")
