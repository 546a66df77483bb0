"""The balancer: builds its parts, listens for clients, and sweeps once a second."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from sgl_ext.balancer.access.authentication import Authentication, KeyFileReloader
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.access.sent_secret import SentSecret
from sgl_ext.balancer.access.shared_keys import SharedKeys
from sgl_ext.balancer.admin.app import ControlPool, make_app
from sgl_ext.balancer.cluster.peers import PeerGroup, Peers
from sgl_ext.balancer.cluster.store_messages import StoreMessages
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.conversations.tenant_documents import TenantDocuments
from sgl_ext.balancer.http.downstream import DownstreamConnection, RawResponse
from sgl_ext.balancer.http.request_head import RequestHeadCache
from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.balancer.metrics.across_processes import SharedSnapshots, merge_pages
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector
from sgl_ext.balancer.reporting.line_file import LineFile, check_file
from sgl_ext.balancer.reporting.request_log import RequestLog
from sgl_ext.balancer.routing.admission_queue import AdmissionQueue
from sgl_ext.balancer.routing.event_subscriber import EventSubscribers
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.readiness import Readiness
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.slots import Slots
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.balancer.routing.worker_sources import WorkerSources
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.balancer.store.opening import open_store
from sgl_ext.doctor.findings import merged
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.limits.stall import StallMonitor
from sgl_ext.membership.member import Membership
from sgl_ext.membership.sources import open_sources
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError, shutting_down
from sgl_ext.requests.strip import HeaderStrip
from sgl_ext.settings.checks import read_api_key
from sgl_ext.settings.schema import BalancerSettings
from sgl_ext.supervision import Guard, count_unhandled, supervise
from sgl_ext.tenants import Tenants

log = logging.getLogger(__name__)

_BACKLOG = 1024
_METRICS, _FINDINGS = ".prom", ".found"
# How long the start waits for the engines to report what they hold.
_FIRST_REPORT_S = 2.0
# How long it waits for the sources of workers.
_FIRST_LIST_S = 2.0
# How long clients have to read the error that ends their request.
_LAST_WORDS_S = 1.0
_SERVED_WHILE_DRAINING = (*routes.HEALTH, "/metrics")


class Balancer:
    """One balancer process. It serves between `start` and `stop`."""

    def __init__(
        self,
        config: BalancerSettings,
        group: PeerGroup | None = None,
        folder: Path | None = None,
        interval_s: float = 1.0,
        sources: Sequence[Membership] | None = None,
    ) -> None:
        """group, folder: the other processes of this balancer, and a folder that they share.
        interval_s: the time between two sweeps, and between two probes of a worker.
        sources: those of the settings if they are open; otherwise they are opened here.
        Raises SettingsError.
        """
        self._sources = open_sources(config) if sources is None else sources
        self._config = config
        self._interval_s = interval_s
        self._group = group
        self._folder = folder
        self._snapshots = (
            None if group is None or folder is None else SharedSnapshots(folder, group.number)
        )
        self.draining = False
        self.now = 0.0
        self._connections: set[DownstreamConnection] = set()
        self._empty = asyncio.Event()
        self._drained = asyncio.Event()
        self._metrics = metrics = Metrics()
        self.account = ByteAccount(config.account_bytes, metrics.bodies_rejected.inc)
        metrics.held_bytes.set_function(lambda: self.account.used)
        metrics.connections.set_function(self._connections.__len__)
        self._stalls = StallMonitor(metrics.stall_s.observe)
        self._tenants = Tenants(config.tenants, config.max_priority)
        self._key_file = (
            None if config.keys is None else KeyFileReloader(Path(config.keys), self._metrics)
        )
        authentication = Authentication(
            read_api_key(config.api_key), self._key_file, self._tenants, config.isolates_tenants
        )
        self._heads = RequestHeadCache(authentication.admit)
        self._secret = SentSecret(config.engine_secret, metrics)

    async def start(self) -> None:
        """Builds everything and listens. Raises OSError if the address cannot be used.

        The processes of a group share one port, and the kernel spreads connections over them.
        """
        config, metrics = self._config, self._metrics
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        count_unhandled(loop, metrics.background_failed)
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._secret.put_into(self._session)
        strip = HeaderStrip(config.strip_headers)
        group = self._group
        slots, prefixes = (
            (Slots(), Prefixes(limit_segments=config.index_segments))
            if group is None or group.memory is None
            else group.memory.open(group.number)
        )
        metrics.index_segments.set_function(lambda: len(prefixes.index))
        workers = Workers(metrics, sources=[source.name for source in self._sources], slots=slots)
        self._worker_sources = WorkerSources(self._sources, workers, metrics, self._interval_s)
        probes = WorkerProbes(workers, self._session, metrics.background_failed, self._interval_s)
        router = Router(
            workers,
            metrics,
            config.max_in_flight,
            sort_tools=config.sort_tools,
            tenants=self._tenants,
            preemption_threshold=config.preemption_threshold,
            prefixes=prefixes,
        )
        self._admission_queue = AdmissionQueue(
            router, metrics, config.queue_limit, config.queue_timeout_s, config.aging_s
        )
        self._subscribers = EventSubscribers(self._session, router, metrics)
        self._readiness = Readiness(workers, self._subscribers, prefixes, config.warm_timeout_s)
        self._detector = None
        if config.diagnose or config.request_log is not None:
            self._detector = DivergenceDetector(strip, metrics, sort_tools=config.sort_tools)
        self._log_lines = None if config.request_log is None else self._open_log(config.request_log)
        self._request_log = RequestLog(metrics, self._log_lines, self._detector)
        documents, self._shared = open_store(
            config.store, config.store_limit_bytes, metrics, self._folder
        )
        self._documents = TenantDocuments(documents, metrics, config.max_body_bytes)
        conversations = ConversationStore(self._documents, metrics, config.response_ttl_s)
        limits = RateLimits(self._key_file, metrics, config.processes, state=self._shared)
        self._services = Services(
            router,
            self._admission_queue,
            self._request_log,
            metrics,
            strip,
            limits,
            conversations,
            self._secret,
            self._session,
            self.account,
            self._metrics_page,
            self._divergences,
            self._readiness,
            self._worker_sources.rows,
        )
        self._services.control = self._control = ControlPool(make_app(self._services))
        self._peers = self._make_peers(router)
        if self._peers is not None:
            self._peers.start()
        self._shared_keys = None
        if self._key_file is not None and self._shared is not None:
            self._shared_keys = SharedKeys(self._key_file, self._shared, metrics)
            await self._compare_keys()
        steps = self._sweep_steps()
        self._steps = [(Guard(name, metrics.background_failed), step) for name, step in steps]
        await self._control.start()
        self._worker_sources.start()
        await self._worker_sources.wait_until_tried(_FIRST_LIST_S)
        await asyncio.gather(*map(probes.probe, workers.all))
        self._subscribers.sync()
        await self._subscribers.wait_until_tried(_FIRST_REPORT_S)
        self._stalls.start()
        self._tasks = [
            asyncio.create_task(supervise(name, metrics.background_failed, step, self._interval_s))
            for name, step in (
                ("probes", probes.run),
                ("sweep", lambda: self.sweep(loop.time())),
                ("store", self._documents.sweep),
                ("limits", limits.sync),
                ("shared_keys", self._compare_keys),
                ("request_log", self._write_log),
                ("snapshots", self._write_snapshots),
            )
        ]
        self._server = await loop.create_server(
            lambda: DownstreamConnection(self),
            config.host,
            config.port,
            backlog=_BACKLOG,
            reuse_port=self._group is not None,
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Lets running requests end for up to `drain_s` or until `hurry`, and rejects new ones,
        which a closed port could not. Then ends what still runs with an error, and closes all.
        A second call does nothing."""
        if self.draining:
            return
        self.draining = self._services.draining = True
        self._note_idle()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), self._config.drain_s)
        self._server.close()
        for connection in tuple(self._connections):
            connection.end()
        if self._connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), _LAST_WORDS_S)
        for connection in tuple(self._connections):
            connection.abort()
        self._stalls.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._worker_sources.close()
        await self._subscribers.close()
        if self._peers is not None:
            self._peers.stop()
        for pool in self._services.pools():
            pool.close()
        self._services.large_bodies.close()
        await self._control.stop()
        await self._session.close()
        if self._log_lines is not None:
            await self._log_lines.close()
        await self._documents.close()
        if self._shared is not None:
            await self._shared.close()

    def hurry(self) -> None:
        """Ends a `stop`, now or later, without waiting for running requests."""
        self._drained.set()

    def _note_idle(self) -> None:
        if all(connection.is_idle for connection in self._connections):
            self._drained.set()

    # The interface for downstream connections.

    def joined(self, connection: DownstreamConnection) -> bool:
        self._connections.add(connection)
        self._empty.clear()
        is_served = len(self._connections) <= self._config.max_connections
        if not is_served:
            self._metrics.connections_rejected.inc()
        return is_served

    def left(self, connection: DownstreamConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()
        if self.draining:
            self._note_idle()

    def reader(self) -> RequestReader:
        return RequestReader(self._heads, self._config.max_body_bytes, self.account)

    def exchange(self, connection: DownstreamConnection, request: Request) -> Exchange:
        if self.draining and request.head.path not in _SERVED_WHILE_DRAINING:
            request.rejection = request.rejection or shutting_down()
        return Exchange(self._services, connection, request)

    def error_response(self, error: BalancerError, path: str) -> RawResponse:
        return self._services.error_response(error, path)

    # What happens once every interval.

    def sweep(self, now: float) -> None:
        """Takes every step, whether the ones before it failed or not. Until the next sweep it is
        `now` for the deadlines of connections."""
        self.now = now
        for guard, step in self._steps:
            with guard:
                step()

    def _sweep_steps(self) -> list[tuple[str, Callable[[], object]]]:
        """The steps of a sweep: they apply timeouts, and read and write what is shared."""
        return [
            ("timeouts", self._time_out),
            ("connection_pools", self._sweep_pools),
            ("admission_queue", self._admission_queue.sweep),
            ("key_file", self._reload_keys),
            ("engine_secret", self._services.reload_secret),
            ("workers", self._services.workers.remove_drained),
            ("subscriptions", self._subscribers.sync),
            ("prefixes", self._sweep_prefixes),
            ("readiness", self._readiness.note),
            ("peers", self._send_state),
        ]

    def _time_out(self) -> None:
        for connection in [c for c in self._connections if c.deadline < self.now]:
            connection.time_out()

    def _sweep_pools(self) -> None:
        for pool in self._services.pools():
            pool.sweep()

    def _sweep_prefixes(self) -> None:
        prefixes = self._services.router.prefixes
        prefixes.sweep()
        self._metrics.unlisted_segments.counts[()] = prefixes.unlisted

    def _reload_keys(self) -> None:
        if self._key_file is not None and self._key_file.reload_if_changed():
            self._heads.clear()

    async def _compare_keys(self) -> None:
        if self._shared_keys is not None and await self._shared_keys.compare():
            self._heads.clear()

    def _send_state(self) -> None:
        if self._peers is not None:
            self._peers.send_state()

    def _make_peers(self, router: Router) -> Peers | None:
        """The way to the other processes of this balancer, and to those on other nodes."""
        group, messages = self._group, None
        if self._shared is not None:
            secret, number = (None, 0) if group is None else (group.secret, group.number)
            messages = StoreMessages(self._shared, self._metrics, secret, number)
        if group is None and messages is None:
            return None
        return Peers(group, router, self._metrics, store=messages)

    async def _write_log(self) -> None:
        if self._log_lines is not None:
            await self._log_lines.write()

    async def _write_snapshots(self) -> None:
        """Writes what the other processes read, in a thread."""
        if self._snapshots is None:
            return
        write = self._snapshots.write
        await asyncio.to_thread(write, self._metrics.render(), _METRICS)
        if self._detector is not None:
            findings = orjson.dumps(self._detector.findings.as_json())
            await asyncio.to_thread(write, findings, _FINDINGS)

    def _open_log(self, path: str) -> LineFile:
        check_file(path)
        dropped = self._metrics.request_log_dropped_lines
        return LineFile(Path(path), self._config.request_log_limit_bytes, dropped)

    def _divergences(self) -> dict[str, Any] | None:
        """The findings of all processes; None if prompts are not compared."""
        if self._detector is None:
            return None
        others = [] if self._snapshots is None else self._snapshots.read_others(_FINDINGS)
        return merged([self._detector.findings.as_json(), *map(orjson.loads, others)])

    def _metrics_page(self) -> bytes:
        page = self._metrics.render()
        if self._snapshots is None:
            return page
        return merge_pages([page, *self._snapshots.read_others(_METRICS)])
