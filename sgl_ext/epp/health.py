"""What the picker answers to gRPC health checks: whether a gateway should ask it."""

from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from sgl_ext.balancer.relay.services import Services
from sgl_ext.epp.messages import SERVICE

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
