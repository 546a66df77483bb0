"""One stream of a gateway: its messages are read, and become a request whose engine is picked.

    request head, body -> exchange <-> gateway (its client, and its way to the engine)
    answer head, body  -> gateway

A stream has one request. To the balancer's server it is a connection, with the same deadlines.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from sgl_ext.balancer.http.body_codings import CompressedBody
from sgl_ext.balancer.http.request_reader import Request, take
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.server import Balancer
from sgl_ext.integrations.gateway import messages
from sgl_ext.integrations.gateway.gateway import (
    EnvoyGateway,
    GatewayWay,
    Outbox,
    path_of,
    raw_head,
    values_of,
)
from sgl_ext.integrations.gateway.messages import FULL_DUPLEX_STREAMED, NONE, SERVICE
from sgl_ext.limits.bounds import HEAD_S, UNREAD_S, body_deadline_s
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import (
    BalancerError,
    body_too_large,
    shutting_down,
    too_many_connections,
)
from sgl_ext.settings.schema import PickerSettings
from sgl_ext.supervision import supervise


class RequestBody:
    """Collects the body of a request, and holds its bytes of the account.

    arrived_bytes: what has arrived, as it was sent.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        """Raises BalancerError 413 or 415."""
        self._request, head = request, request.head
        self._limit = head.body_limit(request.length, max_bytes)
        self._compressed = CompressedBody(head.encoding, self._limit) if head.encoding else None
        self._body = bytearray()
        self.arrived_bytes = 0

    def add(self, part: bytes) -> None:
        """Takes a part. Raises BalancerError 400, 413, or 503 without room for it."""
        self.arrived_bytes += len(part)
        if self._compressed is not None:
            self._compressed.take(part, partial(take, self._request.hold))
            return
        if self.arrived_bytes > self._limit:
            raise body_too_large(self._limit)
        take(self._request.hold, self.arrived_bytes)
        self._body += part

    def end(self) -> None:
        """Gives the request its body. Raises BalancerError 400 if a part is missing."""
        if self._compressed is None:
            self._request.body = self._body
        else:
            self._compressed.end()
            self._request.body = self._compressed.body


_MODES = {
    "request_body_mode": (FULL_DUPLEX_STREAMED,),
    "response_body_mode": (FULL_DUPLEX_STREAMED, NONE),
}


class StreamAborted(Exception):
    """The stream must end with an error, because no message to the gateway says more."""


class GatewayStream:
    """One stream. Create it in the task that runs it.

    deadline: when `time_out` is due.
    """

    def __init__(
        self,
        balancer: Balancer,
        max_body_bytes: int,
        write: Callable[[messages.Response], Awaitable[None]],
    ) -> None:
        self._balancer = balancer
        self._services = balancer.services
        self._metrics = balancer.services.metrics
        self._max_body_bytes = max_body_bytes
        self._task = asyncio.current_task()
        self._is_aborted = self._is_reading = False
        self._is_read = asyncio.Event()
        self._is_read.set()
        self._outbox = Outbox(write, self._metrics, self.abort)
        self._gateway = EnvoyGateway(self._outbox, self._metrics, self.abort, self._reads)
        self._path = ""
        self._request: Request | None = None
        self._body: RequestBody | None = None
        self._body_began_s = 0.0
        self._exchange: Exchange | None = None
        self.deadline = balancer.now + HEAD_S
        self._is_served = balancer.joined(self)

    async def run(self, requests: AsyncIterator[messages.Request]) -> None:
        """Takes the gateway's messages until the answer is complete. Raises StreamAborted."""
        try:
            await self._read(requests)
            await self._outbox.emptied()
            if self._is_aborted:
                raise StreamAborted
        finally:
            self._close()
            # The caller ends the stream, with an error if this raises.
            await self._outbox.emptied()

    async def _read(self, requests: AsyncIterator[messages.Request]) -> None:
        """Returns when the answer is complete, or the stream is aborted."""
        self._is_reading = True
        try:
            async for message in requests:
                self._is_reading = False
                self._take(message)
                if self._gateway.ended or self._is_aborted:
                    return
                self._is_reading = True
                await self._is_read.wait()
        except asyncio.CancelledError:
            task = self._task
            if self._is_reading or task is None or task.uncancel():
                raise  # the gateway has left
        finally:
            self._is_reading = False

    def _stop_reading(self) -> None:
        """What the gateway may still say does not matter any more."""
        if self._is_reading and self._task is not None:
            self._is_reading = False
            self._task.cancel()

    def _close(self) -> None:
        """The gateway sends and takes nothing any more."""
        self._balancer.left(self)
        self._outbox.close()
        exchange, gateway = self._exchange, self._gateway
        if exchange is not None and not gateway.ended:
            if gateway.is_passed:
                exchange.passed()
            else:
                exchange.client_gone()
        if self._request is not None:
            self._request.hold.release()

    def _take(self, message: messages.Request) -> None:
        kind = messages.kind_of(message)
        try:
            if kind == "request_headers" and self._request is None:
                self._take_head(message)
            elif kind == "request_body" and self._body is not None:
                self._take_body(self._body, message.request_body)
            elif kind == "request_trailers" and self._body is not None:
                self._gateway.has_trailers = True
                self._end_body(self._body)
            elif not self._take_answer(kind, message) and not self._gateway.ended:
                # What was under way when the request was answered is no fault.
                self._metrics.gateway_fault("unexpected message")
        except BalancerError as error:
            self._reject(error)

    def _take_head(self, message: messages.Request) -> None:
        headers = messages.headers_of(message.request_headers.headers)
        self._path = path_of(headers)
        head, length = self._balancer.heads.read(raw_head(headers))
        hold = Hold(self._balancer.account, head.tenant)
        request = self._request = Request(head, length, True, head.rejection, hold)
        gateway = self._gateway
        gateway.headers = values_of(headers)
        gateway.has_body = not message.request_headers.end_of_stream
        way = GatewayWay(gateway, self._services.workers, messages.subset_of(message))
        self._exchange = exchange = Exchange(self._services, gateway, request, way=way)
        self._outbox.on_room = exchange.resume
        request.rejection = request.rejection or self._objection(request, message)
        if request.rejection is None and gateway.has_body:
            self._body = RequestBody(request, self._max_body_bytes)
            self._body_began_s = self._balancer.now
            self.deadline = self._body_began_s + body_deadline_s(0)
        else:
            self._begin(exchange)

    def _objection(self, request: Request, message: messages.Request) -> BalancerError | None:
        """Why this request cannot be served through a gateway, if it cannot."""
        if not self._is_served:
            return too_many_connections()
        if self._balancer.draining:
            return shutting_down()
        modes = messages.modes_of(message)
        self._gateway.shows_answers = modes[1] != NONE
        for (name, allowed), mode in zip(_MODES.items(), modes, strict=True):
            if mode not in allowed:
                self._metrics.gateway_fault("configuration")
                must = " or ".join(map(messages.mode_name, allowed))
                problem = f"The gateway's {name} is {messages.mode_name(mode)}, and must be {must}."
                return BalancerError(HTTPStatus.INTERNAL_SERVER_ERROR, problem)
        head = request.head
        if head.is_socket:
            problem = "A WebSocket cannot be opened through a gateway's endpoint picker."
            return BalancerError(HTTPStatus.NOT_IMPLEMENTED, problem)
        if head.route is None and not head.path.startswith("/v1/"):
            problem = (
                f"{head.method} {head.path}: only the endpoint picker's own port answers this."
            )
            return BalancerError(HTTPStatus.NOT_FOUND, problem)
        return None

    def _take_body(self, body: RequestBody, part: messages.Request) -> None:
        body.add(part.body)
        if part.end_of_stream:
            self._end_body(body)
        else:
            self.deadline = self._body_began_s + body_deadline_s(body.arrived_bytes)

    def _end_body(self, body: RequestBody) -> None:
        body.end()
        assert self._exchange is not None, "a body has a head"
        self._begin(self._exchange)

    def _take_answer(self, kind: str, message: messages.Request) -> bool:
        exchange = self._exchange
        return exchange is not None and self._gateway.take_answer(exchange, kind, message)

    def _begin(self, exchange: Exchange) -> None:
        self._body = None
        self.deadline = math.inf
        exchange.begin()

    def _reject(self, error: BalancerError) -> None:
        """Answers a request whose head or body cannot be accepted."""
        exchange, request = self._exchange, self._request
        if exchange is None or request is None:
            self._gateway.answer(*self._services.error_response(error, self._path))
            return
        request.body = b""
        request.rejection = error
        self._begin(exchange)

    def _reads(self, goes_on: bool) -> None:
        """Whether the gateway's messages are read. If not, it has to take some of ours in time."""
        if self._gateway.ended:
            self._stop_reading()
        elif goes_on:
            self._is_read.set()
        else:
            self._is_read.clear()
        is_under_way = goes_on and not self._gateway.ended
        self.deadline = math.inf if is_under_way else self._balancer.now + UNREAD_S

    # As the server's connection.

    @property
    def is_idle(self) -> bool:
        """A stream is left when its request has ended, so none is idle."""
        return False

    def time_out(self) -> None:
        """Ends the stream after its deadline. An incomplete request gets a 408."""
        if self._body is None:
            self.abort()
        else:
            message = "The request did not arrive in time."
            self._reject(BalancerError(HTTPStatus.REQUEST_TIMEOUT, message))

    def end(self) -> None:
        """Ends the request with an error."""
        if self._exchange is None:
            self.abort()
        elif not self._gateway.ended:
            self._exchange.end()

    def abort(self) -> None:
        """Ends the stream at once. The gateway gets no more of what it has not taken."""
        self._is_aborted = True
        self._outbox.close()
        self._stop_reading()


# The endpoint picker's gRPC server: Envoy's external processing, and health checks.
#
# a stream of a gateway -> GatewayStream -> Pick, an exchange of the balancer

log = logging.getLogger(__name__)

_READY = ("", "readiness", SERVICE)
_ALIVE = "liveness"


class Health(aio.HealthServicer):  # type: ignore[misc]
    """As the balancer's own probes: `/live` for the service `liveness`, `/ready` for the others."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services

    async def update(self) -> None:
        """Compares with the balancer's state. Call it periodically."""
        services = self._services
        is_ready = not services.draining and services.readiness.reason_against() is None
        status = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
        await self.set(_ALIVE, HealthCheckResponse.SERVING)
        for name in _READY:
            await self.set(name, status)


# Of one message. Gateways send bodies in parts of what they read at once.
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Of a body that a gateway may send before it is read, so that a large one need not wait.
_WINDOW_BYTES = 1024 * 1024
_HEALTH_INTERVAL_S = 0.5
# For what is under way when everything has been answered.
_LAST_WORDS_S = 1.0


class EndpointPicker:
    """Serves between `start` and `stop`, as long as its balancer does."""

    def __init__(self, balancer: Balancer, settings: PickerSettings) -> None:
        self._balancer = balancer
        self._settings = settings
        self._streams = 0
        self.port = 0

    async def start(self) -> None:
        """Listens. Raises SystemExit if the address or the certificate cannot be used."""
        settings, services = self._settings, self._balancer.services
        services.models.list_others()  # a gateway also gets the addresses of other engines
        services.metrics.gateway_streams.set_function(lambda: self._streams)
        self._health = Health(services)
        await self._health.update()
        options = (
            ("grpc.so_reuseport", int(settings.processes > 1)),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        )
        self._server = server = grpc.aio.server(options=options)
        service, _, method = messages.METHOD.strip("/").partition("/")
        process = grpc.stream_stream_rpc_method_handler(
            self._process, messages.parse, messages.serialize
        )
        handlers = grpc.method_handlers_generic_handler(service, {method: process})
        server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.port = self._listen(f"{settings.picker_host}:{settings.picker_port}")
        await server.start()
        failed = services.metrics.background_failed
        self._probing = asyncio.create_task(
            supervise("gateway health", failed, self._health.update, _HEALTH_INTERVAL_S)
        )
        log.info("gateways ask at", extra={"address": f"{settings.picker_host}:{self.port}"})

    async def stop(self) -> None:
        """Ends what is left. The balancer has stopped before."""
        self._probing.cancel()
        await asyncio.gather(self._probing, return_exceptions=True)
        await self._server.stop(_LAST_WORDS_S)

    def _listen(self, address: str) -> int:
        settings = self._settings
        try:
            if settings.picker_tls_cert is None or settings.picker_tls_key is None:
                return int(self._server.add_insecure_port(address))
            pair = (Path(settings.picker_tls_key), Path(settings.picker_tls_cert))
            key, cert = (path.read_bytes() for path in pair)
            credentials = grpc.ssl_server_credentials([(key, cert)])
            return int(self._server.add_secure_port(address, credentials))
        except (OSError, RuntimeError) as error:
            raise SystemExit(f"sgl-ext: picker_port={settings.picker_port}: {error}") from None

    async def _process(
        self, requests: AsyncIterator[messages.Request], context: grpc.aio.ServicerContext
    ) -> None:
        """One stream: `ExternalProcessor.Process`."""
        self._streams += 1
        try:
            max_body_bytes = self._settings.max_body_bytes
            await GatewayStream(self._balancer, max_body_bytes, context.write).run(requests)
        except StreamAborted:
            await context.abort(grpc.StatusCode.ABORTED, "the endpoint picker ends this request")
        except grpc.aio.BaseError:
            raise
        except Exception:
            log.exception("a gateway's request failed in the endpoint picker")
            self._balancer.services.metrics.background_failed("gateway stream")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error in the endpoint picker")
        finally:
            self._streams -= 1
