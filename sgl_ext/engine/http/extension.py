"""The extension's state in the HTTP process of an engine.

SGLang calls our hooks as plain functions, so they reach this object through `installed()`.

Its gauges are on the engine's `/metrics`. SGLang adds up the processes of an engine from files,
which have what was last set. So the HTTP process sets its gauges every few seconds.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import zmq

from sgl_ext.compat.template_fitting import Places, Plan
from sgl_ext.compat.template_model import TemplateModel
from sgl_ext.engine.core.counters import background_failed, gauge, show_counters
from sgl_ext.engine.core.folder import Outbox, main_process
from sgl_ext.engine.core.workers import Workers
from sgl_ext.engine.host_cache.message_cache import SCHEMAS, MessageCache
from sgl_ext.engine.host_cache.offered_tools import OfferedTools
from sgl_ext.engine.host_cache.token_cache import TokenCache, make_token_cache
from sgl_ext.engine.host_cache.token_offsets import TokenOffsets
from sgl_ext.engine.host_cache.worth import Worth
from sgl_ext.engine.http.event_broadcaster import EventBroadcaster
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns
from sgl_ext.engine.prefill_ahead.service import prefilling_ahead
from sgl_ext.engine.sglang_http_types import ServingChat, TokenizerManager
from sgl_ext.reading.strip import HeaderStrip
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.supervision import supervise
from sgl_ext.tenants import Tenants
from sgl_ext.version import versions

_LONGEST_STORE_S = 600.0


class HttpExtension:
    """The state of one process.

    chats: the token offsets of each chat front end, which has one tokenizer; None: no text of its
        prompts has their tokens.
    templates: what each one's template does; None if it has none. plans: how to fit messages to it.
    places: where what is no template writes instructions.
    workers: the HTTP processes of this engine.
    in_flight: requests, without the streams of events, which end with the engine.
    is_ending: after SIGTERM and the last request.
    settings_number: the version of the settings that were changed since the start; 0: none.
    broadcasters: of the prefix events of each data-parallel rank.
    degraded: what the engine serves without, as rows of docs/guide/models.md.
    token_cache, message_cache, next_turns: None until the server starts, or if they are off.
    """

    def __init__(
        self, settings: EngineSettings, ranks: int = 1, workers: Workers | None = None
    ) -> None:
        self.settings = settings
        self.workers = workers or Workers()
        self.tenants = Tenants(settings.tenants, settings.max_priority)
        self.strip = HeaderStrip(settings.strip_headers, moves_lines=settings.move_volatile_lines)
        self.broadcasters = tuple(EventBroadcaster(rank=rank) for rank in range(ranks))
        self.in_flight = 0
        self.is_ending = False
        self.settings_number = 0
        self.degraded: tuple[str, ...] = ()
        self.schemas = SCHEMAS
        self.chats: WeakKeyDictionary[ServingChat, TokenOffsets | None] = WeakKeyDictionary()
        self.templates: WeakKeyDictionary[ServingChat, TemplateModel | None] = WeakKeyDictionary()
        self.places: WeakKeyDictionary[ServingChat, Places] = WeakKeyDictionary()
        self.plans: WeakKeyDictionary[ServingChat, Plan] = WeakKeyDictionary()
        self.offered_tools = OfferedTools()
        self.token_cache: TokenCache | None = None
        self.message_cache: MessageCache | None = None
        self.next_turns: NextTurns | None = None
        self._telling: asyncio.Task[None] | None = None
        for broadcaster in self.broadcasters:
            broadcaster.on_cleared = self._cleared

    def rank_of(self, stated: str | None) -> int | None:
        """The data-parallel rank that a balancer states; None if there is only one, or if this
        engine, started again with fewer, does not have it."""
        ranks = len(self.broadcasters)
        if ranks == 1 or stated is None or not (stated.isascii() and stated.isdecimal()):
            return None
        rank = int(stated[:9])
        return rank if rank < ranks else None

    @property
    def subscriber_count(self) -> int:
        """How many readers of prefix events there are."""
        return sum(each.subscriber_count for each in self.broadcasters)

    def tables(self) -> Iterator[tuple[str, str, int, int]]:
        """Name, unit, size and bound of each bounded table."""
        yield from _largest(each.tables() for each in self.broadcasters)
        for name, cache in (("token_cache", self.token_cache), ("messages", self.message_cache)):
            if cache is not None:
                yield name, "bytes", cache.used_bytes, cache.limit_bytes
        offered = self.offered_tools
        yield "offered_tools", "bytes", offered.used_bytes, offered.limit_bytes
        if self.next_turns is not None:
            yield from self.next_turns.tables()

    def accounts(self) -> Iterator[Worth]:
        """What each cache of this process costs and saves."""
        yield self.schemas.worth
        for cache in (self.token_cache, self.message_cache, *self.chats.values()):
            if cache is not None:
                yield cache.worth

    def change(self, settings: EngineSettings, number: int) -> None:
        """Puts changed settings into effect in this process. number: their version."""
        self.settings, self.settings_number = settings, number
        self.tenants.replace(settings.tenants, settings.max_priority)
        if self.next_turns is not None:
            self.next_turns.policy = settings.prefill_ahead
            self.next_turns.prefiller.limit_slices(settings.prefill_ahead_slice_tokens)

    async def store_all(self) -> None:
        """Has the schedulers store what they hold in the tier that engines share, and waits for
        that. The end of the engine limits the wait: what matters most is stored first."""
        sharing = [each for each in self.broadcasters if each.has_shared_tier]
        outboxes = [Outbox(each.rank) for each in sharing]  # what one sends ends with it
        for outbox in outboxes:
            with suppress(zmq.Again):  # a scheduler that reads no orders stores nothing
                outbox.store()
        stored = asyncio.gather(*(each.stored_all.wait() for each in sharing))
        with suppress(TimeoutError):
            await asyncio.wait_for(stored, _LONGEST_STORE_S)

    @asynccontextmanager
    async def serving(self, app: Any, manager: TokenizerManager) -> AsyncIterator[None]:
        """Makes the caches, and prefills ahead while the block runs."""
        limit_bytes = self.settings.token_cache_bytes // self.workers.count
        quarter = limit_bytes // 4
        self.token_cache = make_token_cache(manager.tokenizer, limit_bytes - quarter)
        self.message_cache = MessageCache(quarter) if quarter else None
        async with prefilling_ahead(app, manager, self.settings, self.workers) as next_turns:
            if next_turns is not None:
                self.next_turns = next_turns
            yield

    def on_cleared(self) -> None:
        """Drops what is to be prefilled: the scheduler's cache was emptied."""
        if self.next_turns is not None:
            self.next_turns.drop_all("flushed")

    def _cleared(self) -> None:
        self.on_cleared()
        if self.workers.count > 1:
            self._telling = asyncio.create_task(self.workers.tell_cleared())


def _largest(
    tables: Iterable[Iterable[tuple[str, str, int, int]]],
) -> Iterator[tuple[str, str, int, int]]:
    """Of the tables of several ranks, each by the rank where it is largest."""
    for same in zip(*tables, strict=True):
        yield max(same, key=lambda table: table[2])


_installed: HttpExtension | None = None


def install(extension: HttpExtension) -> None:
    """Makes `extension` the one of this process."""
    global _installed
    _installed = extension


def installed() -> HttpExtension:
    """This process's extension."""
    if _installed is None:  # hooks may run before the HTTP server is set up
        install(HttpExtension(EngineSettings.from_environment()))
    assert _installed is not None
    return _installed


_INTERVAL_S = 5.0
_KINDS = ("scheduler", "detokenizer", "data_parallel_controller", "tokenizer_worker")


@asynccontextmanager
async def gauging(extension: HttpExtension) -> AsyncIterator[None]:
    """Sets the gauges while the block runs, and shows every counter from the start."""
    show_counters()
    gauge("build_info").labels(*(found or "" for found in versions())).set(1)
    for feature in extension.degraded:
        gauge("degraded").labels(feature).set(1)

    async def step() -> None:
        set_gauges(extension)
        set_memory(await asyncio.to_thread(memory_by_kind))

    task = asyncio.create_task(supervise("gauges", background_failed, step, _INTERVAL_S))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def set_gauges(extension: HttpExtension) -> None:
    """Sets the gauges of the HTTP process's own state."""
    gauge("event_subscribers").set(extension.subscriber_count)
    for table, unit, size, limit in extension.tables():
        gauge("table_size").labels(table, unit).set(size)
        gauge("table_limit").labels(table, unit).set(limit)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    off = set()
    for worth in extension.accounts():
        seconds[worth.name, "taken"] += worth.took_s
        seconds[worth.name, "replaced"] += worth.replaced_s
        if worth.is_off:
            off.add(worth.name)
    for (name, work), so_far_s in seconds.items():
        gauge("host_cache_seconds").labels(name, work).set(so_far_s)
        gauge("host_cache_off").labels(name).set(name in off)
    for broadcaster in extension.broadcasters:
        broadcaster.show_caches_off(sorted(off))


def set_memory(by_kind: dict[str, int]) -> None:
    """Sets the memory of the engine's processes; a kind that has ended has none."""
    for kind in ("http", *_KINDS, "other"):
        gauge("engine_memory_bytes").labels(kind).set(by_kind.get(kind, 0))


def memory_by_kind() -> dict[str, int]:
    """The resident bytes of this process and of those that it started, by what they are. It takes
    milliseconds."""
    found: defaultdict[str, int] = defaultdict(int)
    own = main_process()
    found["http"] += own.memory_info().rss
    for child in own.children(recursive=True):
        try:
            title = " ".join(child.cmdline()[:1]).removeprefix("sglang::")
            kind = next((kind for kind in _KINDS if title.startswith(kind)), "other")
            found[kind] += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found
