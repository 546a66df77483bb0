"""The whole balancer: clients' connections, the workers behind them, the control plane beside."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import aiohttp

from sgl_ext.balancer.app import make_app
from sgl_ext.balancer.client_side import ClientConnection
from sgl_ext.balancer.control import ControlPool
from sgl_ext.balancer.door import Door
from sgl_ext.balancer.errors import BalancerError
from sgl_ext.balancer.events import Listeners
from sgl_ext.balancer.exchange import Exchange
from sgl_ext.balancer.gathered import Gathered
from sgl_ext.balancer.head import Heads
from sgl_ext.balancer.ledger import Ledger
from sgl_ext.balancer.metrics import Metrics
from sgl_ext.balancer.parts import Gate, Parts, refusal
from sgl_ext.balancer.reader import Request, RequestReader
from sgl_ext.balancer.router import Router
from sgl_ext.balancer.siblings import Family, Siblings
from sgl_ext.balancer.workers import Workers
from sgl_ext.config import BalancerConfig
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.tenants import Tenants

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_BACKLOG = 1024
# So long the first request waits for the engines to say what they hold already.
_FIRST_WORD_S = 2.0


class Balancer:
    """Serves between `start` and `stop`. Workers are probed from the moment it starts."""

    def __init__(
        self, config: BalancerConfig, family: Family | None = None, folder: Path | None = None
    ) -> None:
        """With a family it is one of several processes, which share a folder."""
        self._family = family
        self._gathered = (
            None if family is None or folder is None else Gathered(folder, family.number)
        )
        self.draining = False
        self.now = 0.0
        self._config = config
        self._heads = Heads(Gate(config.read_api_key()).admit)
        self._connections: set[ClientConnection] = set()
        self._empty = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens on the configured address; raises OSError if that cannot be had.

        A family shares one port, and the kernel spreads the connections over it.
        """
        config = self._config
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._metrics = metrics = Metrics()
        workers = Workers(config.workers, metrics)
        router = Router(
            workers,
            metrics,
            config.max_in_flight,
            sort_tools=config.sort_tools,
            tenants=Tenants(config.tenants, config.max_priority),
            preemption_threshold=config.preemption_threshold,
        )
        strip = HeaderStrip(config.strip_headers)
        self._listeners = Listeners(self._session, router, metrics)
        self._ledger = Ledger(
            metrics, None if config.request_log is None else Path(config.request_log)
        )
        self._door = Door(
            router, metrics, config.queue_limit, config.queue_timeout_s, config.aging_s
        )
        self._control = ControlPool(make_app(router, strip, self._session, metrics, self._page))
        self._parts = Parts(router, self._door, self._ledger, metrics, strip, self._control)
        self._siblings = None
        if self._family is not None:
            self._siblings = Siblings(self._family, router, metrics)
            self._siblings.start()
        await self._control.start()
        await workers.probe(self._session)
        self._listeners.attend()
        await self._listeners.have_tried(_FIRST_WORD_S)
        self._tasks = [
            asyncio.create_task(workers.probe_forever(self._session)),
            asyncio.create_task(self._sweep_forever()),
        ]
        self._server = await loop.create_server(
            lambda: ClientConnection(self),
            config.host,
            config.port,
            backlog=_BACKLOG,
            reuse_port=self._family is not None,
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, lets running exchanges end for up to `drain_s`, then ends all."""
        self.draining = True
        self._server.close()
        for connection in tuple(self._connections):
            connection.close_idle()
        if self._connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), self._config.drain_s)
        for connection in tuple(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listeners.close()
        if self._siblings is not None:
            self._siblings.stop()
        for pool in self._parts.pools():
            pool.close()
        await self._control.stop()
        await self._session.close()
        self._ledger.close()

    # What a client's connection asks of its host.

    def joined(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        self._empty.clear()

    def left(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def reader(self) -> RequestReader:
        return RequestReader(self._heads, self._config.max_body_bytes)

    def exchange(self, connection: ClientConnection, request: Request) -> Exchange:
        return Exchange(self._parts, connection, request)

    def refusal(self, error: BalancerError) -> tuple[int, bytes, bytes, bytes]:
        """The answer to what is no request; it has no path."""
        self._parts.count("", error.status)
        return refusal("", error)

    async def _sweep_forever(self) -> None:
        """Ends what has waited too long; once a second is exact enough for that."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """Ends what is past its deadline at this time, which is now until the next sweep."""
        self.now = now
        for connection in [c for c in self._connections if c.deadline < now]:
            connection.time_out()
        for pool in self._parts.pools():
            pool.sweep()
        self._door.sweep()
        self._ledger.flush()
        self._parts.workers.let_go()
        self._listeners.attend()
        if self._siblings is not None:
            self._siblings.tell_state()
        if self._gathered is not None:
            self._gathered.leave(self._metrics.render())

    def _page(self) -> bytes:
        page = self._metrics.render()
        return page if self._gathered is None else self._gathered.page(page)
