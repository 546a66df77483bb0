"""How a client's connection, the exchange that it runs and the server that has both see each other.

server --has--> connection --runs--> exchange --answers--> the connection, as its client
"""

import asyncio
from typing import Protocol

from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.protocols.errors import BalancerError

# Status, reason, header lines without framing, and body.
RawResponse = tuple[int, bytes, bytes, bytes]
_JOINED_BYTES = 16 * 1024


class Client(Protocol):
    """The connection of a request's client, as its exchange uses it.

    paused: the client does not read as fast as the response arrives.
    """

    @property
    def paused(self) -> bool: ...
    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None: ...
    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None: ...
    def write(self, data: bytes) -> None: ...
    def end_stream(self) -> None: ...

    def keep_awake(self) -> bool:
        """Shows the client that its answer is awaited, beside the answer's stream. False if only
        the stream can show that."""
        ...


class HttpClient(Client, Protocol):
    """A client that can turn to another protocol."""

    def become(self, answer: bytes, protocol: asyncio.BufferedProtocol) -> bytes: ...


class RunningExchange(Protocol):
    """The exchange, as its connection uses it."""

    def begin(self) -> None: ...
    def client_gone(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...


class Connection(Protocol):
    """A client's connection, as the server uses it. deadline: when `time_out` is due."""

    deadline: float

    @property
    def is_idle(self) -> bool: ...
    def time_out(self) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...


class Connections(Protocol):
    """The server, as all connections use it. `now` is the time of its last sweep.

    joined: False if there are too many connections, so that this one must end.
    """

    now: float

    def joined(self, connection: Connection) -> bool: ...
    def left(self, connection: Connection) -> None: ...


class Server(Connections, Protocol):
    """The server, as connections use it that begin with HTTP."""

    draining: bool

    def reader(self) -> RequestReader: ...
    def exchange(self, connection: HttpClient, request: Request) -> RunningExchange: ...
    def error_response(self, error: BalancerError, path: str) -> RawResponse: ...


def write_both(transport: asyncio.Transport, head: bytes, body: bytes | bytearray) -> None:
    """Writes a head and a body at once. Joining small ones is cheaper than a write of two parts."""
    if len(body) <= _JOINED_BYTES:
        transport.write(head + body)
    else:
        transport.writelines((head, body))
