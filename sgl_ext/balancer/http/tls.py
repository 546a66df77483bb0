"""TLS on the balancer's port.

    TCP <--encrypted--> TlsConnection <--plain bytes--> the connection of HTTP
                        (TCP's protocol, and the transport of the application protocol)

    arrived --0x16--> in its handshake --complete--> plain bytes go both ways
       |                    |
       +--text--> refused   +--faulty, too slow, or displaced by newer ones--> closed

A handshake costs the event loop a millisecond or more for its signature, so each round of the loop
does one step of one handshake, and what runs beside it goes on. Until its handshake is complete a
connection is in a bounded table; when that is full the oldest leaves, as a client that is there
completes within a few round trips. Only then is it a connection of a client to the balancer.

`ssl`'s objects in memory are used in place of the event loop's own TLS, which cannot end its own
side alone (`write_eof`), counts no handshake, and logs plain HTTP in place of an answer.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from sgl_ext.limits.bounds import HANDSHAKE_S, MAX_HANDSHAKE_BYTES, MAX_HANDSHAKES
from sgl_ext.settings.certificates import Certificate

# Shared by all connections: its content is copied before the next read.
_SCRATCH = memoryview(bytearray(64 * 1024))
_HANDSHAKE_READ_BYTES = 4 * 1024
_FIRST_OF_TLS = 0x16
_MAX_LINE_BYTES = 4 * 1024


class TlsPort:
    """What the connections of one port share: the certificate, and the handshakes in work."""

    limit = MAX_HANDSHAKES

    def __init__(
        self,
        certificate: Certificate,
        make: Callable[[], asyncio.BufferedProtocol],
        plain_answer: Callable[[str], bytes],
        failed: Callable[[str], None],
    ) -> None:
        """make: the application protocol of a connection, once its handshake is complete.

        plain_answer: what a client gets that speaks plain HTTP and requests this path.
        failed: called with the reason for each connection that ends before that.
        """
        self.certificate = certificate
        self.make = make
        self.plain_answer = plain_answer
        self.failed = failed
        # Each with its deadline; the oldest first.
        self._handshakes: dict[TlsConnection, float] = {}
        self._ready: deque[TlsConnection] = deque()
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._handshakes)

    def connection(self) -> "TlsConnection":
        """The protocol of a new connection of TCP."""
        return TlsConnection(self)

    def joined(self, connection: "TlsConnection") -> None:
        if len(self._handshakes) >= self.limit:
            next(iter(self._handshakes)).end("displaced")
        self._handshakes[connection] = self._loop.time() + HANDSHAKE_S

    def left(self, connection: "TlsConnection") -> None:
        self._handshakes.pop(connection, None)

    def queue(self, connection: "TlsConnection") -> None:
        """Has the connection's handshake go on in a round of the event loop of its own."""
        if not self._ready:
            self._loop.call_soon(self._run)
        self._ready.append(connection)

    def sweep(self, now: float) -> None:
        """Ends handshakes that took too long. Call it periodically."""
        while self._handshakes:
            oldest, deadline = next(iter(self._handshakes.items()))
            if now < deadline:
                return
            oldest.end("timeout")

    def close(self) -> None:
        """Ends all handshakes."""
        for connection in tuple(self._handshakes):
            connection.end("closed")

    def _run(self) -> None:
        connection = self._ready.popleft()
        while connection not in self._handshakes and self._ready:
            connection = self._ready.popleft()
        if self._ready:
            self._loop.call_soon(self._run)
        if connection in self._handshakes:
            connection.handshake()


class TlsConnection(asyncio.BufferedProtocol):
    """One connection. From its handshake on it is the transport of the application protocol, with
    the methods that those of HTTP and WebSockets use."""

    def __init__(self, port: TlsPort) -> None:
        self._port = port
        self._raw: asyncio.Transport
        self._app: asyncio.BufferedProtocol | None = None
        self._tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._handshake_bytes = 0
        self._plain = bytearray()
        self._counted = False
        self._reading = False
        self._reading_paused = False
        self._deaf = False  # what arrives is dropped
        self._ended = False  # our side has sent its last

    # TCP's transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._port.joined(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH if self._app is not None else _SCRATCH[:_HANDSHAKE_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf:
            return
        if self._app is not None:
            self._incoming.write(_SCRATCH[:nbytes])
            self._read()
        elif self._tls is None and (self._plain or _SCRATCH[0] != _FIRST_OF_TLS):
            self._plain += _SCRATCH[:nbytes]
            self._refuse_plain()
        else:
            self._handshake_bytes += nbytes
            if self._handshake_bytes > MAX_HANDSHAKE_BYTES:
                self._fail()
                return
            if self._tls is None:
                context = self._port.certificate.context
                self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._incoming.write(_SCRATCH[:nbytes])
            self._raw.pause_reading()
            self._port.queue(self)

    def eof_received(self) -> None:
        if self._app is not None and not self._deaf:
            self._app.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._deaf = self._ended = True
        if self._app is not None:
            self._app.connection_lost(error)
        else:
            self._port.left(self)
            self._count("faulty")

    def pause_writing(self) -> None:
        if self._app is not None:
            self._app.pause_writing()

    def resume_writing(self) -> None:
        if self._app is not None:
            self._app.resume_writing()

    # Before the handshake is complete.

    def handshake(self) -> None:
        """Goes on with the handshake by what has arrived."""
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            self._raw.resume_reading()
            return
        except ssl.SSLError:
            self._flush()  # an alert says why
            self._fail()
            return
        self._flush()
        self._port.left(self)
        self._app = app = self._port.make()
        app.connection_made(self)  # type: ignore[arg-type]  # a transport by its methods
        if not self._reading_paused and not self._raw.is_closing():
            self._raw.resume_reading()
        self._read()  # a request may have come with the end of the handshake

    def _refuse_plain(self) -> None:
        line, found, _ = bytes(self._plain[:_MAX_LINE_BYTES]).partition(b"\r\n")
        if not line[:1].isalpha():
            self._fail()
        elif found or len(self._plain) >= _MAX_LINE_BYTES:
            self._deaf = True
            words = line.split(b" ")
            path = words[1].partition(b"?")[0] if len(words) == 3 else b""
            self._raw.write(self._port.plain_answer(path.decode("latin-1")))
            # Closing at once could cost the client the answer: the sweep does it.
            self._raw.write_eof()
            self._count("plain")

    def _fail(self) -> None:
        self._count("faulty")
        self._deaf = True
        self._raw.close()

    def end(self, reason: str) -> None:
        """Ends it at once, without the end of its handshake."""
        self._port.left(self)
        self._count(reason)
        self._raw.abort()

    def _count(self, reason: str) -> None:
        if not self._counted:
            self._counted = True
            self._port.failed(reason)

    # After the handshake: bytes go to the application protocol, and come from it.

    def _read(self) -> None:
        if self._reading or self._tls is None:
            return
        self._reading = True
        try:
            while self._app is not None and not (self._reading_paused or self._deaf):
                view = self._app.get_buffer(-1)
                try:
                    size = self._tls.read(len(view), view)  # type: ignore[arg-type]
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLError:
                    self._raw.abort()
                    break
                del view  # while there is one, its buffer cannot grow
                if not cast(int, size):
                    self._deaf = True
                    self._app.eof_received()
                    self.close()
                    break
                self._app.buffer_updated(cast(int, size))
        finally:
            self._reading = False
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())

    def _encrypt(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._ended and self._tls is not None:
            try:
                self._tls.write(data)
            except ssl.SSLError:
                self._raw.abort()

    def _end_side(self) -> None:
        """Says that nothing more comes: without it the client could take an end for a cut."""
        if not self._ended and self._tls is not None:
            self._ended = True
            with suppress(ssl.SSLError, ValueError):  # it would wait for the client's own end
                self._tls.unwrap()
            self._flush()

    # The transport of the application protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._encrypt(data)
        self._flush()

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self._encrypt(part)
        self._flush()

    def write_eof(self) -> None:
        self._end_side()
        self._deaf = True
        self._raw.write_eof()

    def close(self) -> None:
        self._end_side()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BufferedProtocol) -> None:
        self._app = protocol

    def pause_reading(self) -> None:
        self._reading_paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._raw.resume_reading()
        if not self._reading:
            asyncio.get_running_loop().call_soon(self._read)
