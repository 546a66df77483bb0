"""The balancer: listens for clients, and sweeps once a second. Its parts are in `parts`."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from sgl_ext.balancer.access.authentication import Authentication, KeyFileReloader, SentSecret
from sgl_ext.balancer.cluster.launcher import LauncherUnreachable
from sgl_ext.balancer.cluster.peers import PeerGroup
from sgl_ext.balancer.conversations.response_turns import LaneTurns
from sgl_ext.balancer.http.downstream import (
    Client,
    Connection,
    DownstreamConnection,
    HttpClient,
    RawResponse,
    RunningExchange,
)
from sgl_ext.balancer.http.request_head import RequestHeadCache
from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.balancer.http.tls import TlsPort
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.parts import Basis, Parts
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.relay.resends import socket_path
from sgl_ext.balancer.relay.responses_socket import SocketHandshake
from sgl_ext.balancer.relay.services import Services
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.membership.member import Membership
from sgl_ext.membership.sources import open_sources
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError, plain_http, shutting_down
from sgl_ext.settings.certificates import certificate_of
from sgl_ext.settings.reloading import LiveSettings
from sgl_ext.settings.schema import BalancerSettings, PickerSettings, SettingsError
from sgl_ext.settings.secrets import read_api_key
from sgl_ext.supervision import Guard, StallMonitor, count_unhandled, supervise
from sgl_ext.tenants import Tenants

_BACKLOG = 1024
# How long clients have to read the error that ends their request.
_LAST_WORDS_S = 1.0
_CHANGED = "changed.json"
_SERVED_WHILE_DRAINING = (*routes.HEALTH, *routes.METRICS, routes.STATE)


class Balancer:
    """One balancer process. It serves between `start` and `stop`."""

    def __init__(
        self,
        config: BalancerSettings,
        group: PeerGroup | None = None,
        folder: Path | None = None,
        interval_s: float = 1.0,
        sources: Sequence[Membership] | None = None,
        read: Callable[[], BalancerSettings] | None = None,
    ) -> None:
        """group, folder: the other processes of this balancer, and a folder that they share.
        interval_s: the time between two sweeps, and between two probes of a worker.
        sources: those of the settings if they are open; otherwise they are opened here.
        read: reads the settings again, if they are of a file.
        Raises SettingsError.
        """
        self._live = _live(config, read, folder)
        config = self._live.current
        self._interval_s = interval_s
        self._group, self._folder = group, folder
        self.draining = False
        self.now = 0.0
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._drained = asyncio.Event()
        self._hurried = asyncio.Event()
        self._metrics = metrics = Metrics(0 if group is None else group.number)
        self.account = account = ByteAccount(config.account_bytes, metrics.bodies_rejected.inc)
        metrics.held_bytes.set_function(lambda: account.used)
        metrics.connections.set_function(self._connections.__len__)
        metrics.draining.set_function(lambda: self.draining)
        self._stalls = StallMonitor(metrics.stall_s.observe)
        self._certificate = certificate_of(config, self._count_certificate("refused"))
        self._tls: TlsPort | None = None
        tenants = Tenants(config.tenants, config.max_priority)
        key_file = None if config.keys is None else KeyFileReloader(Path(config.keys), metrics)
        authentication = Authentication(
            read_api_key(config.api_key),
            key_file,
            tenants,
            config.isolates_tenants,
            is_behind_gateway=isinstance(config, PickerSettings),
        )
        self._heads = RequestHeadCache(authentication.admit)
        add_table = metrics.tables.add
        add_table("byte_budget", lambda: account.used, lambda: account.limit_bytes, "bytes")
        add_table("connections", self._connections.__len__, lambda: self._config.max_connections)
        add_table("request_heads", self._heads.__len__, lambda: self._heads.limit)
        self._basis = Basis(
            self._live,
            metrics,
            account,
            tenants,
            key_file,
            self._heads,
            SentSecret(config.engine_secret, metrics),
            open_sources(config) if sources is None else sources,
            group,
            folder,
            interval_s,
        )

    async def start(self) -> None:
        """Builds everything and listens. Raises OSError if the address cannot be used.

        The processes of a group share one port, and the kernel spreads connections over them.
        """
        loop, failed = asyncio.get_running_loop(), self._metrics.background_failed
        self.now = loop.time()
        count_unhandled(loop, failed)
        self._parts = Parts(self._basis)
        self._services = self._parts.services
        await self._parts.start()
        make: Callable[[], asyncio.BufferedProtocol] = partial(DownstreamConnection, self)
        self._servers = []
        if self._group is not None and self._folder is not None:
            path = socket_path(self._folder, self._group.number)
            with Guard("peer_socket", failed):  # clients are served without it
                path.unlink(missing_ok=True)  # of a process with this number that has died
                self._servers = [await loop.create_unix_server(make, str(path))]
        if self._certificate is not None:
            self._tls = TlsPort(self._certificate, make, self._plain_answer, self._count_handshake)
            self._metrics.tables.add("tls_handshakes", self._tls.__len__, lambda: TlsPort.limit)
            self._show_certificate()
            make = self._tls.connection
        steps = [
            ("timeouts", self._time_out),
            ("certificate", self._reload_certificate),
            *self._parts.steps(),
        ]
        self._steps = [(Guard(name, failed), step) for name, step in steps]
        self._stalls.start()
        self._tasks = [
            asyncio.create_task(supervise(name, failed, task, self._interval_s))
            for name, task in (("sweep", lambda: self.sweep(loop.time())), *self._parts.tasks())
        ]
        self._server = await loop.create_server(
            make,
            self._config.host,
            self._config.port,
            backlog=_BACKLOG,
            reuse_port=self._group is not None,
        )
        self._servers.append(self._server)

    @property
    def _config(self) -> BalancerSettings:
        """The settings in effect."""
        return self._parts.config

    @property
    def services(self) -> Services:
        """What its requests use. It exists from `start` on."""
        return self._services

    @property
    def heads(self) -> RequestHeadCache:
        """Reads the heads of its requests, and checks their keys."""
        return self._heads

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Lets running requests end for up to `drain_s` or until `hurry`, and rejects new ones,
        which a closed port could not: for `drain_min_s` at least, so that a load balancer in front
        finds out. Then ends what still runs with an error, and closes all. A second call does
        nothing."""
        if self.draining:
            return
        self.draining = True
        self._services.drain()
        least_s, most_s = min(self._config.drain_min_s, self._config.drain_s), self._config.drain_s
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), least_s)
        self._note_idle()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), most_s - least_s)
        for server in self._servers:
            server.close()
        for connection in tuple(self._connections):
            connection.end()
        if self._connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), _LAST_WORDS_S)
        for connection in tuple(self._connections):
            connection.abort()
        if self._tls is not None:
            self._tls.close()
        self._stalls.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._parts.close()

    async def reload(self) -> None:
        """Reads the settings again and applies what can change, and the certificate. The log says
        what that was."""
        self._reload_certificate(always=True)
        with suppress(SettingsError, LauncherUnreachable):
            await self._parts.reloads.reload()

    def hurry(self) -> None:
        """Ends a `stop`, now or later, without waiting for running requests."""
        self._hurried.set()
        self._drained.set()

    def _note_idle(self) -> None:
        if all(connection.is_idle for connection in self._connections):
            self._drained.set()

    # The interface for downstream connections.

    def joined(self, connection: Connection) -> bool:
        self._connections.add(connection)
        self._empty.clear()
        is_served = len(self._connections) <= self._config.max_connections
        if not is_served:
            self._metrics.connections_rejected.inc()
        return is_served

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()
        if self.draining:
            self._note_idle()

    def reader(self) -> RequestReader:
        return RequestReader(self._heads, self._config.max_body_bytes, self.account)

    def exchange(self, connection: HttpClient, request: Request) -> RunningExchange:
        if not request.head.is_socket:
            return self._exchange(connection, request)
        self._reject_while_draining(request)
        return SocketHandshake(
            self._services,
            self,
            self._heads,
            connection,
            request,
            self._config.max_body_bytes,
            self._exchange,
        )

    def _exchange(
        self, client: Client, request: Request, turns: LaneTurns | None = None
    ) -> Exchange:
        if self.draining:
            self._reject_while_draining(request)
        return Exchange(self._services, client, request, turns)

    def _reject_while_draining(self, request: Request) -> None:
        if self.draining and request.head.path not in _SERVED_WHILE_DRAINING:
            request.rejection = request.rejection or shutting_down()

    def error_response(self, error: BalancerError, path: str) -> RawResponse:
        return self._services.error_response(error, path)

    # The certificate, and connections before they speak HTTP.

    def _reload_certificate(self, *, always: bool = False) -> None:
        if self._certificate is not None and self._certificate.reload(always=always):
            self._count_certificate("applied")()
            self._show_certificate()

    def _show_certificate(self) -> None:
        if self._certificate is not None:
            self._metrics.certificate_expiry.set(self._certificate.expires_s)

    def _count_certificate(self, result: str) -> Callable[[], None]:
        counts = self._metrics.file_reloads.counts

        def count() -> None:
            counts["tls", result] += 1

        return count

    def _count_handshake(self, reason: str) -> None:
        self._metrics.tls_handshakes_failed.counts[(reason,)] += 1

    def _plain_answer(self, path: str) -> bytes:
        status, reason, lines, body = self.error_response(plain_http(), path)
        framing = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        return b"HTTP/1.1 %d %b\r\n%b%b%b" % (status, reason, lines, framing, body)

    # What happens once every interval.

    def sweep(self, now: float) -> None:
        """Takes every step, whether the ones before it failed or not. Until the next sweep it is
        `now` for the deadlines of connections."""
        self.now = now
        for guard, step in self._steps:
            with guard:
                step()

    def _time_out(self) -> None:
        if self._tls is not None:
            self._tls.sweep(self.now)
        for connection in [c for c in self._connections if c.deadline < self.now]:
            connection.time_out()


def _live(
    config: BalancerSettings, read: Callable[[], BalancerSettings] | None, folder: Path | None
) -> LiveSettings[BalancerSettings]:
    """The settings in effect, by the file of the launcher, or of this balancer's processes."""
    given = config.changed_settings
    path = Path(given) if given is not None else folder / _CHANGED if folder is not None else None
    return LiveSettings(config, read, path)
