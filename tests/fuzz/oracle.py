"""h11 as the oracle of HTTP/1.1, and how a difference is reported."""

from __future__ import annotations

from typing import Any

import h11

_LIMIT_EVENT = 1 << 20
Headers = list[tuple[bytes, bytes]]


class Difference(AssertionError):
    """The balancer and h11 understand the same bytes differently."""


def oracle(role: type, data: bytes, method: bytes = b"", is_closed: bool = False) -> h11.Connection:
    """h11 as server or client, with what it has received. A client has sent its request."""
    oracle = h11.Connection(role, max_incomplete_event_size=_LIMIT_EVENT)
    if role is h11.CLIENT:
        oracle.send(h11.Request(method=method, target="/x", headers=[("host", "here")]))
        oracle.send(h11.EndOfMessage())
    oracle.receive_data(data)
    if is_closed:
        oracle.receive_data(b"")
    return oracle


def events(oracle: h11.Connection, kind: type, *, is_whole: bool = True) -> tuple[Any, bytes]:
    """The head and the body of the next message. Raises Difference if h11 does not accept it."""
    head, body = None, b""
    try:
        while True:
            event = oracle.next_event()
            if isinstance(event, kind):
                head = event
                if not is_whole:
                    return head, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return head, body
            elif not isinstance(event, h11.InformationalResponse):
                raise Difference(f"h11 says {event!r}")
    except h11.RemoteProtocolError as error:
        raise Difference(f"h11 refuses: {error}") from None


def comparable(head: Any) -> Headers:
    """Headers without the length, and without those that the Connection header names.

    h11 writes a transfer coding in lower case.
    """
    kept = {b"connection"} if isinstance(head, h11.Response) else {b"connection", b"host"}
    dropped = named_by_connection(head.headers) - kept | {b"content-length"}
    return [
        (bytes(name), value.lower() if name == b"transfer-encoding" else bytes(value))
        for name, value in head.headers
        if name not in dropped
    ]


def named_by_connection(headers: Any) -> frozenset[bytes]:
    """The names and options in Connection headers."""
    values = [value.lower() for name, value in headers if name == b"connection"]
    return frozenset(token.strip() for value in values for token in value.split(b","))


def equal(what: str, ours: object, theirs: object) -> None:
    """Raises Difference if the two are not equal."""
    if ours != theirs:
        raise Difference(f"{what}: {ours!r} and {theirs!r}")
