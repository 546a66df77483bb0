"""The WebSocket mode of `/v1/responses`: many responses over one connection.

Each message is the body of a request, and becomes one: it has the handshake's headers, so its key
is checked again, and an exchange of its own. So routing, limits, log and metrics are those of
`POST /v1/responses`. Messages of a lane (`stream_id`, or none) are answered one after the other,
those of several lanes at once.

    frame -> unread -> [another process reads it] -> waiting -> running -> ended
                                                       one for each lane
"""

import asyncio
from collections import deque
from collections.abc import Callable

from sgl_ext.balancer.conversations.connection_turns import ConnectionTurns, LaneTurns
from sgl_ext.balancer.http.downstream import Client, Connections, HttpClient, RunningExchange
from sgl_ext.balancer.http.request_head import RequestHead, RequestHeadCache, header_lines
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.websocket import VERSION_LINE, WebSocketConnection, handshake
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.relay.socket_turn import (
    RESTATED,
    Message,
    SocketTurn,
    error_event,
    read_large_message,
    read_message,
)
from sgl_ext.limits.bounds import LARGE_BODY_BYTES, MAX_SOCKET_MESSAGES
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import BalancerError, internal_error
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.supervision import Guard

# Of the handshake, and not of the requests.
_NOT_OF_TURNS = frozenset(
    b"content-encoding content-type expect sec-websocket-extensions sec-websocket-key "
    b"sec-websocket-protocol sec-websocket-version x-request-id".split()
)
_HEAD = b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\n%b%b\r\n"
_WARMS = f"{PREFILL}?wait=false&protocol={RESPONSES.name}".encode()

Begin = Callable[[Client, Request, LaneTurns], RunningExchange]


class SocketHandshake:
    """The exchange of a handshake: it opens the WebSocket, or answers with an error."""

    def __init__(
        self,
        services: Services,
        server: Connections,
        heads: RequestHeadCache,
        connection: HttpClient,
        request: Request,
        limit_bytes: int,
        begin: Begin,
    ) -> None:
        """heads: reads the heads of the requests. limit_bytes: of one message. begin: makes the
        exchange of a request."""
        self._services = services
        self._server = server
        self._heads = heads
        self._connection = connection
        self._request = request
        self._limit_bytes = limit_bytes
        self._begin = begin

    def begin(self) -> None:
        services, head = self._services, self._request.head
        try:
            if self._request.rejection is not None:
                raise self._request.rejection
            frames, answer = handshake(head)
        except BalancerError as error:
            status, reason, lines, body = services.error_response(error, head.path)
            self._connection.answer(status, reason, lines + VERSION_LINE, body)
            return
        metrics = services.metrics
        metrics.requests.counts[head.path, 101] += 1
        connection = WebSocketConnection(
            self._server,
            frames,
            head.tenant,
            services.account,
            self._limit_bytes,
            metrics.socket_closed,
        )
        connection.user = ResponsesSocket(services, self._heads, connection, head, self._begin)
        connection.received(self._connection.become(answer, connection))

    def client_gone(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...


class ResponsesSocket:
    """The messages of one WebSocket, and their responses."""

    def __init__(
        self,
        services: Services,
        heads: RequestHeadCache,
        connection: WebSocketConnection,
        head: RequestHead,
        begin: Begin,
    ) -> None:
        self._services = services
        self._heads = heads
        self._connection = connection
        self._path, self._tenant = head.path, head.tenant
        self._target = head.target
        self._lines = header_lines(head.headers, {*_NOT_OF_TURNS, RESTATED.encode()})
        stated = head.fields.get(RESTATED.encode())
        self._stated = b"" if stated is None else b"%b: %b\r\n" % (RESTATED.encode(), stated)
        self._begin = begin
        forgot = services.metrics.socket_turns_forgotten.inc
        self._turns = ConnectionTurns(services.account.hold(head.tenant), forgot)
        self._unread: deque[tuple[bytearray, Hold]] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._waiting: list[SocketTurn] = []
        self._running: dict[str | None, SocketTurn] = {}
        self._unsent: list[Hold] = []
        self._starting = False
        self._gone = False
        self._guard = Guard("websocket_messages", services.metrics.background_failed)
        services.metrics.sockets.inc()

    @property
    def _messages(self) -> int:
        is_reading = self._reading is not None
        return len(self._unread) + is_reading + len(self._waiting) + len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._messages

    @property
    def is_full(self) -> bool:
        return self._messages >= MAX_SOCKET_MESSAGES

    def message(self, text: bytearray, hold: Hold) -> None:
        """Takes a message, which is answered after earlier ones of its lane."""
        self._unread.append((text, hold))
        self._read_next()

    def refuse(self, error: BalancerError) -> None:
        """Sends an error that is no response's."""
        status, _, lines, body = self._services.error_response(error, self._path)
        self._connection.send(error_event(status, lines, body))

    def resume(self) -> None:
        """The client reads again."""
        for hold in self._unsent:
            hold.release()
        self._unsent.clear()
        for turn in tuple(self._running.values()):
            turn.exchange.resume()
        self._go_on()

    def gone(self) -> None:
        """The client disconnected, or has to. A second call does nothing."""
        if self._gone:
            return
        self._gone = True
        self._services.metrics.sockets.dec()
        running, self._running = self._running, {}
        for turn in running.values():
            turn.exchange.client_gone()
        holds = [turn.hold for turn in (*running.values(), *self._waiting)]
        for hold in (*holds, *self._unsent, *(hold for _, hold in self._unread)):
            hold.release()
        self._waiting.clear()
        self._unread.clear()
        self._turns.close()

    def end(self) -> None:
        """Ends all responses with an error."""
        for turn in self._waiting:
            turn.hold.release()
        self._waiting.clear()
        for turn in tuple(self._running.values()):
            turn.exchange.end()

    def _read_next(self) -> None:
        """Reads messages in their order; a large one in another process."""
        while self._unread and self._reading is None:
            text, hold = self._unread.popleft()
            if len(text) > LARGE_BODY_BYTES:
                self._reading = asyncio.create_task(self._read_large(text, hold))
            else:
                try:
                    self._add(read_message(text), hold)
                except BalancerError as error:
                    hold.release()
                    self.refuse(error)
        self._go_on()

    async def _read_large(self, text: bytearray, hold: Hold) -> None:
        # An event loop keeps no reference to a task, but `_reading` does.
        message, error = None, internal_error()
        with self._guard:
            try:
                bodies = self._services.large_bodies
                message, body = await bodies.call(self._tenant, text, read_large_message)
                message = message._replace(body=body)
            except BalancerError as refused:
                error = refused
        self._reading = None
        if self._gone:
            hold.release()
            return
        if message is None:
            hold.release()
            self.refuse(error)
        else:
            self._add(message, hold)
        self._read_next()

    def _add(self, message: Message, hold: Hold) -> None:
        lane = self._turns.lane(message.lane)
        self._waiting.append(SocketTurn(message, hold, self._connection, lane, self._ended))

    def _go_on(self) -> None:
        """Starts what can start: the first message of each lane in which none is answered."""
        if self._starting:
            return
        self._starting = True
        try:
            while not self._gone and not self._connection.paused:
                free = (t for t in self._waiting if t.message.lane not in self._running)
                turn = next(free, None)
                if turn is None:
                    break
                self._waiting.remove(turn)
                self._start(turn)
        finally:
            self._starting = False
        if not self._gone:
            if self._services.draining and self.is_idle:
                self._connection.close("shutdown")
            else:
                self._connection.read_on()

    def _start(self, turn: SocketTurn) -> None:
        self._running[turn.message.lane] = turn
        target = self._target if turn.message.warms is None else _WARMS
        stated = turn.message.lines or self._stated
        head, _ = self._heads.read(_HEAD % (target, self._lines, stated))
        body = turn.message.body
        turn.message = turn.message._replace(body=b"")  # the exchange drops it when it is sent
        request = Request(head, len(body), True, head.rejection, turn.hold, body)
        turn.exchange = self._begin(turn, request, turn.turns)
        turn.exchange.begin()

    def _ended(self, turn: SocketTurn) -> None:
        self._running.pop(turn.message.lane, None)
        if self._connection.paused and not self._gone:  # the client has not read it all
            turn.hold.set(self._connection.unsent_bytes)
            self._unsent.append(turn.hold)
        else:
            turn.hold.release()
        self._go_on()
