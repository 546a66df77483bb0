"""A client's bytes: what the balancer reads in them, and what it would send to an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import h11

from sgl_ext.balancer.http.request_head import HOP_BY_HOP, RequestHeadCache
from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.balancer.http.upstream import ConnectionPool
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols.errors import BalancerError
from tests.fuzz.oracle import comparable, equal, events, named_by_connection, oracle

LIMIT_BODY = 100_000
_POOL = ConnectionPool("http://engine:1")


def check_requests(stream: bytes, pieces: list[bytes], heads: RequestHeadCache) -> int:
    """Compares what the two read. Returns how many requests the balancer accepted."""
    accepted = _read(RequestReader(heads, LIMIT_BODY, ByteAccount(1 << 30)), pieces)
    rest = stream
    for request in accepted:
        is_last = request.unread
        while rest.startswith(b"\r\n"):
            rest = rest[2:]
        if b"host" not in request.head.fields:
            line_end = rest.index(b"\r\n")
            rest = rest[:line_end] + b"\r\nhost: none" + rest[line_end:]
        theirs = oracle(h11.SERVER, rest)
        head, body = events(theirs, h11.Request, is_whole=not is_last)
        equal("method", request.head.method.encode(), head.method)
        equal("target", request.head.target, _path_of(head.target))
        added = [] if b"host" in request.head.fields else [(b"host", b"none")]
        equal("headers", [*added, *comparable(request.head)], comparable(head))
        if is_last:
            break
        if request.rejection is None:
            equal("body", bytes(request.body), body)
            _check_forwarded(request)
        if request.keep_alive and request.head.http_1_1:
            equal("keep-alive", theirs.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL), True)
        rest = theirs.trailing_data[0]
    return len(accepted)


def _read(reader: RequestReader, pieces: list[bytes]) -> list[Request]:
    """The requests up to the first fault, or to the end of the connection."""
    requests = []
    try:
        for piece in pieces:
            while piece:
                buffer = reader.buffer()
                size = min(len(buffer), len(piece))
                buffer[:size] = piece[:size]
                reader.received(size)
                piece = piece[size:]
                while request := reader.next():
                    requests.append(request)
                    if not request.keep_alive:
                        return requests
    except BalancerError:
        pass
    return requests


def forwarded(request: Request) -> bytes:
    """What the balancer would send to an engine."""
    sent: list[bytes] = []
    services: Any = SimpleNamespace(
        control=_POOL, span_export=None, models=SimpleNamespace(default=None)
    )
    connection: Any = SimpleNamespace(
        send=lambda _, head, body, method: sent.extend((head, bytes(body)))
    )
    client: Any = None
    Exchange(services, client, request).send(connection)
    return b"".join(sent)


def _check_forwarded(request: Request) -> None:
    """What the engine would get is, for h11, this one request."""
    theirs = oracle(h11.SERVER, forwarded(request))
    head, body = events(theirs, h11.Request)
    equal("forwarded method", head.method, request.head.method.encode())
    equal("forwarded target", head.target, request.head.target)
    equal("forwarded body", body, bytes(request.body))
    equal("bytes after the forwarded request", theirs.trailing_data[0], b"")
    named = {name for name, _ in head.headers} - {b"host", b"content-length"}
    of_connection = HOP_BY_HOP | named_by_connection(request.head.headers)
    equal("headers of the connection", named & of_connection, set())


def _path_of(target: bytes) -> bytes:
    """A target in absolute form as its path and query."""
    if not target.lower().startswith(b"http://"):
        return target
    rest = target[7:]
    ends = [at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0]
    path = rest[min(ends) :] if ends else b"/"
    if path.find(b"?") == len(path) - 1:  # an empty query
        path = path[:-1]
    return path if path.startswith(b"/") else b"/" + path
