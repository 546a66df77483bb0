"""Heads of requests and answers, between a gateway's list of headers and our header lines.

A gateway's request becomes the bytes of an HTTP/1.1 head, so that it is read, checked and cached
as the balancer's own requests are.
"""

from collections.abc import Sequence
from http import HTTPStatus

from sgl_ext.balancer.http.request_head import HOP_BY_HOP
from sgl_ext.limits.bounds import MAX_HEAD_BYTES
from sgl_ext.protocols.errors import BalancerError

Header = tuple[bytes, bytes]
Values = dict[bytes, list[bytes]]

# The gateway frames messages itself. It says `upgrade` only with a request to upgrade.
_FRAMING = (HOP_BY_HOP - {b"upgrade", b"content-length"}) | {b"host"}
_NOT_CHANGED = HOP_BY_HOP | {b"host", b"expect"}


def path_of(headers: Sequence[Header]) -> str:
    """The path of a request, "" if it has none."""
    target = dict(headers).get(b":path", b"")
    return target.partition(b"?")[0].decode("latin-1")


def raw_head(headers: Sequence[Header]) -> bytes:
    """A request's head as bytes. Raises BalancerError 400 or 431."""
    pseudo = dict(headers)
    lines = [
        b"%b %b HTTP/1.1" % (pseudo.get(b":method", b""), pseudo.get(b":path", b"")),
        b"host: %b" % pseudo.get(b":authority", b""),
    ]
    for name, value in headers:
        if name not in _FRAMING and not name.startswith(b":"):
            lines.append(b"%b: %b" % (name, value))
    if b"upgrade" in pseudo:
        lines.append(b"connection: upgrade")
    raw = b"\r\n".join(lines)
    # A line end within a value would be read as a header of its own.
    if raw.count(b"\r") != len(lines) - 1 or raw.count(b"\n") != len(lines) - 1:
        raise BalancerError(HTTPStatus.BAD_REQUEST, "Malformed HTTP request: a line end.")
    if len(raw) > MAX_HEAD_BYTES:
        message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
        raise BalancerError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
    return raw + b"\r\n\r\n"


def values_of(headers: Sequence[Header]) -> Values:
    """The values of each header that may be changed."""
    found: Values = {}
    for name, value in headers:
        if name not in _NOT_CHANGED and not name.startswith(b":"):
            found.setdefault(name, []).append(value)
    return found


def parse_lines(lines: bytes) -> list[Header]:
    """The headers of our own header lines."""
    split = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name.lower(), value) for name, _, value in split]


def changes(before: Values, after: Values) -> tuple[list[Header], list[bytes]]:
    """Which headers to set, and which to remove, so that `before` becomes `after`."""
    changed = [
        (name, value)
        for name, values in after.items()
        if before.get(name) != values
        for value in values
    ]
    return changed, [name for name in before if name not in after]
