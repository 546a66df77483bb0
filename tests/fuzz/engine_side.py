"""An engine's bytes: what the balancer reads in them, and what its client gets.

The two connections, the exchange between them and the caches of heads are the balancer's own.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import h11

from sgl_ext.balancer.http.downstream import DownstreamConnection
from sgl_ext.balancer.http.request_head import HOP_BY_HOP, RequestHeadCache
from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.relay.services import error_response
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.request_ids import NAMES
from tests.fuzz.oracle import comparable, equal, events, oracle

_LIMIT_BODY = 1000
_LINE_ENDS = re.compile(rb"(^|\r\n\r\n)[\r\n]+(?=HTTP/)")
_POOL = ConnectionPool("http://engine:1")


class _Transport:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self.data += data

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(map(bytes, parts)))

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


class _Exchange(Exchange):
    is_broken = False

    def upstream_lost(self, reason: str) -> None:
        self.is_broken = True
        super().upstream_lost(reason)


class _Nothing:
    """In place of services whose results decide nothing here."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Server:
    """A balancer of which only the two connections and the exchange are real."""

    draining = False
    now = 0.0

    def __init__(self, pool: ConnectionPool) -> None:
        self.exchanges: list[_Exchange] = []
        self._heads = RequestHeadCache(lambda head: None)
        nothing = _Nothing()
        self._services: Any = SimpleNamespace(
            control=pool,
            models=nothing,
            retries=nothing,
            router=nothing,
            rate_limits=nothing,
            admission_queue=nothing,
            trials=nothing,
            metrics=nothing,
            sampled_log=nothing,
            span_export=None,
            error_response=lambda error, path, id, **_: error_response(path, error, id),
        )

    def joined(self, connection: DownstreamConnection) -> bool:
        return True

    def left(self, connection: DownstreamConnection) -> None:
        pass

    def reader(self) -> RequestReader:
        return RequestReader(self._heads, _LIMIT_BODY, ByteAccount(_LIMIT_BODY))

    def exchange(self, connection: DownstreamConnection, request: Request) -> _Exchange:
        self.exchanges.append(_Exchange(self._services, connection, request))
        return self.exchanges[-1]

    def error_response(self, error: BalancerError, path: str) -> Any:
        return error_response(path, error)


def check_answer(stream: bytes, pieces: list[bytes], method: bytes, version: bytes) -> bool:
    """Compares what the two read. Returns whether the balancer passed the answer on."""
    server = _Server(_POOL)
    engine, client = _Transport(), _Transport()
    upstream, downstream = UpstreamConnection(_POOL), DownstreamConnection(server)
    upstream.connection_made(engine)  # type: ignore[arg-type]
    _POOL._idle[:] = [upstream]
    downstream.connection_made(client)  # type: ignore[arg-type]
    asked = b"%b /x %b\r\nhost: here\r\n\r\n" % (method, version)
    downstream.get_buffer(0)[: len(asked)] = asked
    downstream.buffer_updated(len(asked))
    for piece in pieces:
        if piece and not engine.is_closed:
            upstream.data_received(piece)
    is_reused = upstream in _POOL._idle
    if not is_reused and not engine.is_closed:
        upstream.connection_lost(None)
    _POOL._idle.clear()
    _POOL.connections.clear()
    (exchange,) = server.exchanges
    got = oracle(h11.CLIENT, client.data, method, is_closed=client.is_closed)
    head, body = events(got, h11.Response)
    equal("bytes after the answer", got.trailing_data[0], b"")
    if exchange.is_broken:
        return False
    stream = _LINE_ENDS.sub(rb"\1", stream)
    sent = oracle(h11.CLIENT, stream, method, is_closed=not is_reused)
    sent_head, sent_body = events(sent, h11.Response)
    equal("status", head.status_code, sent_head.status_code)
    equal("reason", head.reason, sent_head.reason)
    equal("body", body, sent_body)
    replaced = HOP_BY_HOP | NAMES  # the balancer names the request itself
    equal(
        "headers",
        [header for header in comparable(head) if header[0] not in replaced],
        [header for header in comparable(sent_head) if header[0] not in replaced],
    )
    if is_reused:
        equal("bytes after the engine's answer", sent.trailing_data[0].strip(b"\r\n"), b"")
        equal("whether the engine keeps the connection", sent.their_state, h11.DONE)
    return True
