"""What all exchanges of one balancer share, and the gate that a request passes at its head."""

from __future__ import annotations

import hmac
from http import HTTPStatus

from scheduler.retry_budget import RetryBudget
from sgl_ext.balancer import routes
from sgl_ext.balancer.door import Door
from sgl_ext.balancer.errors import BalancerError, Protocol, error_body, retry_headers
from sgl_ext.balancer.head import Head
from sgl_ext.balancer.ledger import Ledger
from sgl_ext.balancer.metrics import Metrics
from sgl_ext.balancer.router import Router
from sgl_ext.balancer.spares import Spares
from sgl_ext.balancer.worker_side import Pool
from sgl_ext.balancer.workers import Worker
from sgl_ext.requests.headers import HeaderStrip

_UNGUARDED = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/"), ("HEAD", "/")}


class Parts:
    """The workers and the connections to them, the control plane, and what is counted."""

    def __init__(
        self,
        router: Router,
        door: Door,
        ledger: Ledger,
        metrics: Metrics,
        strip: HeaderStrip,
        control: Pool,
    ) -> None:
        self.router = router
        self.workers = router.workers
        self.door = door
        self.ledger = ledger
        self.retries = RetryBudget()
        self.metrics = metrics
        self.strip = strip
        self.control = control
        self._pools: dict[Worker, Pool] = {}
        self.spares = Spares(router, metrics, self.pool)
        self.workers.on_leave(self._drop_pool)

    def pool(self, worker: Worker) -> Pool:
        """The connections to a worker."""
        pool = self._pools.get(worker)
        if pool is None:
            pool = self._pools[worker] = Pool(worker.url)
        return pool

    def _drop_pool(self, worker: Worker) -> None:
        """A worker has left, or is away: what runs there may run on, so that it ends as it ends."""
        if worker in self._pools:
            self._pools[worker].close_kept()
            if worker not in self.workers.all:
                del self._pools[worker]

    def pools(self) -> list[Pool]:
        """Every pool of connections."""
        return [self.control, *self._pools.values()]

    def count(self, path: str, status: int) -> None:
        """Counts an answer of the balancer's own."""
        self.metrics.requests.counts[routes.label_of(path), int(status)] += 1


class Gate:
    """Refuses at the head what the rest of a request cannot make right."""

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    def admit(self, head: Head) -> None:
        """Finds the head's route. Raises BalancerError 401, 405 or 415."""
        if self._key is not None and (head.method, head.path) not in _UNGUARDED:
            self._check_key(head.fields, self._key)
        head.route = route = routes.to_one(head.method, head.path)
        if route is not None and route.placed and head.content_type != "application/json":
            raise BalancerError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-type: must be application/json, not {head.content_type!r}",
            )

    def _check_key(self, fields: dict[bytes, bytes], key: bytes) -> None:
        """The key as OpenAI's clients send it or Anthropic's."""
        scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        offered = bearer or fields.get(b"x-api-key", b"")
        if not hmac.compare_digest(offered, key):
            raise BalancerError(HTTPStatus.UNAUTHORIZED, "Invalid or missing API key.")


def refusal(path: str, error: BalancerError) -> tuple[int, bytes, bytes, bytes]:
    """An error as an answer in the caller's protocol: status, reason, header lines, body."""
    status = HTTPStatus(error.status)
    lines = b"content-type: application/json\r\n"
    for name, value in retry_headers(error).items():
        lines += f"{name}: {value}\r\n".encode()
    body = error_body(Protocol.of(path), status.value, error.message)
    return status.value, status.phrase.encode(), lines, body
