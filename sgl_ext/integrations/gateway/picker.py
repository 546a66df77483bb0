"""The endpoint picker's gRPC server: Envoy's external processing, and health checks.

a stream of a gateway -> GatewayStream -> Pick, an exchange of the balancer
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.server import Balancer
from sgl_ext.integrations.gateway import messages
from sgl_ext.integrations.gateway.messages import SERVICE
from sgl_ext.integrations.gateway.stream import GatewayStream, StreamAborted
from sgl_ext.settings.schema import PickerSettings
from sgl_ext.supervision import supervise

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
