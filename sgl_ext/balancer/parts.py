"""The parts of one balancer process: they are built, run in the background, and are closed."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import orjson

from radix.index_memory import segments_within
from sgl_ext.balancer.access.authentication import KeyFileReloader, SentSecret, SharedKeys
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.access.usage import UsageLedger
from sgl_ext.balancer.admin.app import ControlPool, make_app
from sgl_ext.balancer.admin.state import part
from sgl_ext.balancer.cluster.launcher import Launcher, Reloads
from sgl_ext.balancer.cluster.peers import PeerGroup, Peers, StoreMessages
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.conversations.tenant_documents import TenantDocuments
from sgl_ext.balancer.http.request_head import RequestHeadCache
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.bodies import Bodies
from sgl_ext.balancer.relay.reading import HintRules
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.activity import Activity
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector, QuickDetector
from sgl_ext.balancer.reporting.event_log import EventLog, EventWatch
from sgl_ext.balancer.reporting.request_log import LineFile, RequestLog, check_file, tenant_label
from sgl_ext.balancer.reporting.spans import open_export
from sgl_ext.balancer.reporting.whole_balancer import WholeBalancer
from sgl_ext.balancer.routing.admission import AdmissionQueue, Trials
from sgl_ext.balancer.routing.engine_settings import EngineSettingsSender
from sgl_ext.balancer.routing.models import ModelPool, Models
from sgl_ext.balancer.routing.prefix_events import EventSubscribers
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.readiness import Readiness
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.standby_prefill import StandbyPrefill
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.balancer.routing.workers import Slots, Workers, WorkerSet, WorkerSources
from sgl_ext.balancer.store.opening import open_store
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.membership.member import Membership
from sgl_ext.reading.strip import HeaderStrip
from sgl_ext.settings.reloading import LiveSettings
from sgl_ext.settings.schema import IN_MEMORY, OFF, BalancerSettings
from sgl_ext.settings.secrets import read_store
from sgl_ext.tenants import Tenants

# The latest requests of all processes, if there is no request log.
_REMEMBERED, _REMEMBERED_BYTES = "requests", 4 << 20
# How long the start waits for the engines to report what they hold.
_FIRST_REPORT_S = 2.0
# How long it waits for the sources of workers.
_FIRST_LIST_S = 2.0


@dataclass(frozen=True, eq=False)
class Basis:
    """What a balancer process has before its event loop runs.

    key_file: the keys of its clients, if they have keys. heads: of its clients' requests.
    secret: by which workers know it. sources: of its workers. group, folder: the other processes
    of this balancer, and a folder that they share.
    interval_s: the time between two sweeps, and between two probes of a worker.
    """

    live: LiveSettings[BalancerSettings]
    metrics: Metrics
    account: ByteAccount
    tenants: Tenants
    key_file: KeyFileReloader | None
    heads: RequestHeadCache
    secret: SentSecret
    sources: Sequence[Membership]
    group: PeerGroup | None
    folder: Path | None
    interval_s: float


class Parts:
    """What a balancer consists of, besides its clients' connections.

    config: the settings in effect.
    """

    def __init__(self, basis: Basis) -> None:
        self._tenants = tenants = basis.tenants
        self._live = live = basis.live
        config, group, folder = live.current, basis.group, basis.folder
        self.config = config
        self._metrics = metrics = basis.metrics
        self._key_file = key_file = basis.key_file
        self._heads = basis.heads
        secret = basis.secret
        self._interval_s = interval_s = basis.interval_s
        # Each worker has a few connections, one of them for its events: a limit for all would keep
        # probes waiting.
        self._session = session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        secret.put_into(session)
        strip = HeaderStrip(config.strip_headers, moves_lines=config.move_volatile_lines)
        slots, prefixes = (
            (Slots(), Prefixes(limit_segments=segments_within(config.index_limit_bytes)))
            if group is None or group.memory is None
            else group.memory.open(group.number)
        )
        metrics.index_segments.set_function(lambda: len(prefixes.index))
        self._workers = Workers(
            metrics, sources=[source.name for source in basis.sources], slots=slots
        )
        self._sources = WorkerSources(basis.sources, self._workers, metrics, interval_s)
        self._probes = WorkerProbes(
            self._workers,
            session,
            metrics.background_failed,
            interval_s,
            config.compile_timeout_s,
            stated=lambda worker, stated: self._models.note(worker, stated),
        )
        self._prefixes = prefixes
        self._models = models = Models(
            self._workers,
            metrics,
            self._make_pool,
            [one.name for one in config.served],
            *_meanings(config),
        )
        self._subscribers = EventSubscribers(session, models, metrics)
        self._readiness = Readiness(
            self._workers, self._subscribers, prefixes, config.warm_timeout_s
        )
        # The doctor remembers prompts only where `--diagnose` says so.
        make_detector = DivergenceDetector if config.diagnose else QuickDetector
        detector = make_detector(strip, metrics, sort_tools=config.sort_tools)
        number = 0 if group is None else group.number
        self._whole = whole = WholeBalancer(metrics, detector, folder, number)
        lines = _open_log(config, metrics)
        shared = None
        if lines is None and folder is not None:
            shared = LineFile(folder / _REMEMBERED, _REMEMBERED_BYTES, metrics)
        documents, self._shared, usage = open_store(
            config.store, config.store_limit_bytes, metrics, folder
        )
        activity = Activity(time.time())
        activity.add_tables(metrics.tables)
        self._documents = TenantDocuments(documents, metrics, config.max_body_bytes)
        self._limits = RateLimits(key_file, metrics, config.processes, state=self._shared)
        self._limits.usage = UsageLedger(usage)
        if group is not None and group.memory is not None:
            self._limits.at_once = group.memory.requests_at_once(group.number)
        self._shared_keys = None
        if key_file is not None and self._shared is not None:
            self._shared_keys = SharedKeys(key_file, self._shared, metrics)
        self._launcher = Launcher(config.launcher_socket)
        self._request_log = request_log = RequestLog(
            metrics,
            activity,
            lines,
            detector,
            partial(tenant_label, tenants, key_file),
            shared,
        )
        conversations = ConversationStore(self._documents, metrics, config.response_ttl_s)
        self._sender = EngineSettingsSender(
            self._workers, session, lambda: live.version, metrics.engine_settings_failures
        )
        self.reloads = Reloads(live, self._launcher, self._sender, self._apply, metrics)
        self.services = Services(
            metrics,
            basis.account,
            models,
            self._limits,
            Bodies(
                metrics,
                basis.account,
                strip,
                conversations,
                HintRules(config.hints),
                sort_tools=config.sort_tools,
            ),
            secret,
            session,
            request_log,
            activity,
            whole,
            self._readiness,
            self._sources,
            self.reloads,
            self._launcher,
            open_export(config, metrics),
            self._make_control,
        )
        self.services.heartbeats.change(config.first_byte_s, interval_s)
        self.services.resends.change(config.resend_s)
        self._peers = self._make_peers(group, folder, models)
        path = _events_path(config, folder)
        events = self.services.events = EventLog(path)
        self.reloads.add_event = events.add
        request_log.add_event = events.add
        self._watch = EventWatch(events, metrics, self._workers, is_first=number == 0)
        if path is not None:
            metrics.run_folder_free_bytes.set_function(
                partial(_disk_bytes, path.parent, "f_bavail")
            )
            metrics.run_folder_bytes.set_function(partial(_disk_bytes, path.parent, "f_blocks"))

    def _make_pool(self, name: str) -> ModelPool:
        """What belongs to one model, by the settings in effect."""
        config, metrics, workers = self.config, self._metrics, WorkerSet()
        router = Router(
            workers,
            metrics,
            config.max_in_flight,
            tenants=self._tenants,
            preemption_threshold=config.preemption_threshold,
            prefixes=self._prefixes.of_model(),
        )
        router.attempts.speeds.learns = config.learn_speeds
        router.lists_others = config.request_log not in (None, OFF)
        router.hashes_sessions = config.hash_sessions
        queue = AdmissionQueue(
            router,
            metrics,
            config.queue_limit,
            config.queue_timeout_s,
            config.aging_s,
            config.agent_hold_s,
        )
        trials = Trials(router, lambda: queue.timeout_s)
        standby = StandbyPrefill(router, metrics, self._session)
        return ModelPool(name, workers, router, queue, trials, standby)

    def _make_control(self, services: Services) -> ControlPool:
        self._control = ControlPool(make_app(services, self._interval_s))
        return self._control

    async def start(self) -> None:
        """Learns of the workers and what they hold, as far as they answer at once."""
        if self._peers is not None:
            self._peers.start()
        await self._compare_keys()
        await self._limits.usage.sync()  # so that the first requests know their budgets
        await self._control.start()
        self._sources.start()
        await self._sources.wait_until_tried(_FIRST_LIST_S)
        await asyncio.gather(*map(self._probes.probe, self._workers.all))
        self._subscribers.sync()
        await self._subscribers.wait_until_tried(_FIRST_REPORT_S)

    def tasks(self) -> list[tuple[str, Callable[[], Awaitable[object] | None]]]:
        """What runs in the background, each again and again, by its name."""
        return [
            ("probes", self._probes.run),
            ("store", self._documents.sweep),
            ("limits", self._limits.sync),
            ("usage", self._limits.usage.sync),
            ("shared_keys", self._compare_keys),
            ("engine_settings", self._sender.send),
            ("request_log", self._request_log.write),
            ("events", partial(asyncio.to_thread, self.services.events.write)),
            ("snapshots", self._write_snapshots),
        ]

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """The steps of a sweep: they apply timeouts, and read and write what is shared."""
        return [
            ("connection_pools", self.services.sweep_connections),
            ("admission_queue", self._models.sweep_queues),
            ("trials", self._models.sweep_trials),
            ("heartbeats", self.services.heartbeats.sweep),
            ("resends", self.services.resends.sweep),
            ("key_file", self._reload_keys),
            ("engine_secret", self.services.reload_secret),
            ("settings", self.reloads.refresh),
            ("workers", self._sweep_workers),
            ("event_watch", self._watch.look),
            ("subscriptions", self._subscribers.sync),
            ("prefixes", self._sweep_prefixes),
            ("readiness", self._readiness.note),
            ("peers", self._send_state),
            ("hit_rates", self.services.sample_hit_rates),
            ("sampled_log", self.services.sampled_log.sweep),
        ]

    async def close(self) -> None:
        self.services.resends.close()
        await self._sources.close()
        await self._subscribers.close()
        if self._peers is not None:
            self._peers.stop()
        self.services.close()
        await self._control.stop()
        await self._session.close()
        await self._launcher.close()
        await self._request_log.close()
        with suppress(OSError):
            await asyncio.to_thread(self.services.events.write)
        if self.services.span_export is not None:
            await self.services.span_export.close()
        await self._limits.usage.sync()
        await self._documents.close()
        if self._shared is not None:
            await self._shared.close()

    def _apply(self, config: BalancerSettings) -> None:
        """Uses what can change without a restart: `sgl_ext.settings.reloading`."""
        self._tenants.replace(config.tenants, config.max_priority)
        services = self.services
        services.bodies.change(HintRules(config.hints), config.response_ttl_s)
        services.heartbeats.change(config.first_byte_s, services.heartbeats.interval_s)
        services.resends.change(config.resend_s)
        for pool in self._models.all:
            pool.router.worker_limit = config.max_in_flight
            pool.router.preemption_threshold = config.preemption_threshold
            pool.router.attempts.speeds.learns = config.learn_speeds
            pool.queue.change(
                config.queue_limit, config.queue_timeout_s, config.aging_s, config.agent_hold_s
            )
        self._models.change(*_meanings(config))
        self._request_log.change(config.request_log_limit_bytes, config.request_log_age_s)
        self.config = config
        self._heads.clear()  # heads have their tenants' cache groups

    def _sweep_workers(self) -> None:
        self._workers.remove_drained()
        self._workers.forget_silent(time.time())

    def _sweep_prefixes(self) -> None:
        for pool in self._models.all:
            pool.router.prefixes.sweep()
        self._metrics.unlisted_segments.counts[()] = self._prefixes.unlisted

    def _reload_keys(self) -> None:
        if self._key_file is None:
            return
        has_changed = self._key_file.reload_if_changed()
        if has_changed:
            self._limits.show()
        if self._key_file.some_expired() or has_changed:
            self._heads.clear()

    async def _compare_keys(self) -> None:
        if self._shared_keys is not None and await self._shared_keys.compare():
            self._heads.clear()

    def _send_state(self) -> None:
        if self._peers is not None:
            self._peers.send_state()

    def _make_peers(
        self, group: PeerGroup | None, folder: Path | None, models: Models
    ) -> Peers | None:
        """The way to the other processes of this balancer, and to those on other nodes."""
        messages = None
        if self._shared is not None:
            secret, number = (None, 0) if group is None else (group.secret, group.number)
            messages = StoreMessages(self._shared, self._metrics, secret, number)
        if group is None and messages is None:
            return None
        resends = self.services.resends
        peers = Peers(
            group,
            models,
            self._metrics,
            store=messages,
            left_elsewhere=resends.left_elsewhere,
        )
        if group is not None:
            resends.folder, resends.on_left = folder, peers.send_left
        return peers

    async def _write_snapshots(self) -> None:
        await self._whole.write(lambda: orjson.dumps(part(self.services, time.time())))


def _meanings(config: BalancerSettings) -> tuple[dict[str, str], dict[str, str]]:
    """The aliases of models, and the fallbacks of those that have one."""
    fallbacks = {one.name: one.fallback for one in config.served if one.fallback}
    return {alias.name: alias.model for alias in config.aliases}, fallbacks


def _events_path(config: BalancerSettings, folder: Path | None) -> Path | None:
    """The file of events: the launcher's, or else one beside the store, or else one in the folder
    of this balancer's processes. None: only this process has them."""
    if config.event_log is not None:
        return Path(config.event_log)
    if config.store not in (None, IN_MEMORY) and not read_store(config.store).is_shared:
        return Path(read_store(config.store).url).with_name("events.jsonl")
    return None if folder is None else folder / "events.jsonl"


def _disk_bytes(folder: Path, blocks: str) -> float:
    """Bytes of the disk of a folder: those that are free, or all; NaN if that is not known."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return float("nan")
    return float(getattr(found, blocks) * found.f_frsize)


def _open_log(config: BalancerSettings, metrics: Metrics) -> LineFile | None:
    if config.request_log in (None, OFF):
        return None
    check_file(config.request_log)
    limit_bytes, age_s = config.request_log_limit_bytes, config.request_log_age_s
    return LineFile(Path(config.request_log), limit_bytes, metrics, age_s)
