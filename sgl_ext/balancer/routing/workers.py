"""The table of workers: which there are, as their sources say, and which a probe finds ready.

The sources are followed: each list that one yields replaces its part of the table.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf, nextafter
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radix.residency import Tier
from sgl_ext.balancer.metrics.registry import Metrics, gauges
from sgl_ext.balancer.routing.worker import DECODE, PREFILL, STATES, Worker, rank_id
from sgl_ext.membership.member import ADMIN, Member, Membership, MembershipError, merge
from sgl_ext.supervision import supervise
from sgl_ext.wire.peers import AdminChanges

log = logging.getLogger(__name__)


# More would not fit into a message between balancers.
MOST_ADDED = 256
# How many removed workers are remembered that no source of this balancer lists.
MOST_ELSEWHERE = 256
# Data-parallel ranks of one engine.
MOST_RANKS = 256


def can_answer(workers: Iterable[Worker]) -> bool:
    """Whether these workers can answer requests: one that does all, or one of each role."""
    roles = {worker.role for worker in workers}
    return "" in roles or {PREFILL, DECODE} <= roles


class Slots:
    """The slots of one process's workers: their bits in the prefix index, and whether they are
    ready. A slot is free again after its worker has left."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._ready: set[int] = set()

    def take(self, worker: str) -> int:
        """A free slot for a worker. `worker`: its name; no two that are there have the same."""
        slot = next(slot for slot in count() if slot not in self._taken)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """The worker has left, and nothing is known of it any more."""
        self._taken.discard(slot)
        self._ready.discard(slot)

    def mark(self, slot: int, *, ready: bool) -> None:
        """Whether this process finds its worker ready."""
        if ready:
            self._ready.add(slot)
        else:
            self._ready.discard(slot)

    def all_ready(self, slot: int) -> bool:
        """Whether each process that has the worker finds it ready."""
        return slot in self._ready


class WorkerSet:
    """Workers, and how to find one of them: those of one model, or all.

    has_roles: whether some are prefill or decode engines.
    has_tiers: whether some have slower tiers.
    slots: a bitmask of what they hold something under.
    on_leave: called with each worker that is removed or no longer ready.
    on_found: called with each worker that a probe finds ready, and when the probe began.
    """

    def __init__(self) -> None:
        self.all: list[Worker] = []
        self.has_roles = False
        self.has_tiers = False
        self.slots = 0
        self.on_leave: list[Callable[[Worker], None]] = []
        self.on_found: list[Callable[[Worker, float], None]] = []
        self._by_id: dict[str, Worker] = {}
        self._by_slot: dict[int, Worker] = {}
        self._masks: defaultdict[int, int] = defaultdict(int)

    @property
    def ready(self) -> list[Worker]:
        """The workers that are ready and do not drain."""
        return [worker for worker in self.all if worker.ready and not worker.draining]

    def readiness(self) -> tuple[int, int]:
        """How many engines are ready, with all of their ranks, and how many should be: all that are
        listed, but for those that their source lets leave."""
        wanted = [w for w in self.all if not w.is_gone and w.member.state != "draining"]
        lacking = {(w.member.id, w.url) for w in wanted if w.state != "ready"}
        engines = {(w.member.id, w.url) for w in wanted}
        return len(engines - lacking), len(engines)

    def find(self, name: str) -> Worker | None:
        """The worker with this id. One that stays comes before one that leaves."""
        return self._by_id.get(name)

    def at_slot(self, slot: int) -> Worker | None:
        """The worker with this bit in the prefix index, which may be that of its host."""
        return self._by_slot.get(slot)

    def mask_of(self, slot: int) -> int:
        """A bitmask of the workers for which something is held that is held under this slot: one,
        or all that have this shared tier."""
        return self._masks.get(slot, 0)

    def find_url(self, url: str) -> Worker | None:
        """The worker with this URL. One that takes requests comes before one that drains."""
        found = [worker for worker in self.all if worker.url == url.rstrip("/")]
        return min(found, key=lambda worker: worker.draining, default=None)

    def slots_of(self, worker: Worker) -> list[int]:
        """The slots of the segments that no other ready worker can read."""
        slots = [worker.slot, worker.host_slot]
        if not any(w.ready and w.machine == worker.machine for w in self.all if w is not worker):
            slots.append(worker.shared_slot)
        return [slot for slot in slots if slot is not None]

    def index(self) -> None:
        """Call it when `all` has changed, or a worker's slots or role. A worker that stays counts
        before one with the same id that leaves."""
        leaving_first = sorted(self.all, key=lambda worker: not worker.is_gone)
        self._by_id = {worker.id: worker for worker in leaving_first}
        self._by_slot = {worker.slot: worker for worker in self.all}
        self._by_slot |= {w.host_slot: w for w in self.all if w.host_slot is not None}
        self.has_roles = any(each.role for each in self.all)
        self.has_tiers = any(w.has_tiers for w in self.all)
        self.slots = 0
        self._masks = defaultdict(int)
        for worker in self.all:
            for slot in (worker.slot, worker.host_slot, worker.shared_slot):
                if slot is not None:
                    self._masks[slot] |= 1 << worker.slot
                    self.slots |= 1 << slot


class Workers(WorkerSet, Collector):
    """All engines, and their metrics.

        sources --> apply --> all <-- change -- admin API

    admin: what the admin API changed.
    on_change: called when there are other workers, or they have other slots or roles.
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        sources: Sequence[str] = (),
        slots: Slots | None = None,
    ) -> None:
        """sources: their names, the most important first. slots: those of all processes that share
        a prefix index; without them, this process has its own."""
        super().__init__()
        self.admin = AdminChanges()
        self.on_change: list[Callable[[], None]] = []
        self._metrics = metrics
        self._clock = clock
        self._slots = slots or Slots()
        self._order = sources
        self._lists: dict[str, Sequence[Member]] = {}
        self._ignored: set[str] = set()
        self._ranks: dict[tuple[str, str], int] = {}
        metrics.registry.register(self)
        metrics.tables.add("added_workers", lambda: len(self.admin.added), lambda: MOST_ADDED)

    def collect(self) -> Iterable[Metric]:
        yield from gauges(self._by_id, STATES, self._clock())
        ready, wanted = self.readiness()
        text = "Engines that are ready for requests."
        yield GaugeMetricFamily("sgl_ext_engines_ready", text, ready)
        text = "Engines that should be ready: those that drain, start or have ended are among them."
        yield GaugeMetricFamily("sgl_ext_engines_wanted", text, wanted)

    def apply(self, source: str, members: Sequence[Member]) -> None:
        """Replaces the list of a source. A worker that is on no list any more gets no new requests,
        and is removed after its last one; one that is back before that is taken back."""
        is_first = source not in self._lists
        self._lists[source] = members
        order = [*self._order, *self._lists]
        self._lists = {name: self._lists[name] for name in order if name in self._lists}
        # The engines of a source's first list were there before, and have a warm cache.
        self._update(None if is_first else self._clock())

    def change(self, admin: AdminChanges) -> None:
        """Replaces what the admin API changed, unless our changes are later."""
        if admin.changed_s > self.admin.changed_s:
            self.admin = admin
            self._update(self._clock())

    def add(self, url: str, wall_s: float) -> Worker | None:
        """Adds a worker for the admin API, or takes back one that it removed. None if a source
        names it and that entry is ignored.

        wall_s: the time by the wall clock, which balancers on several machines share.
        """
        url = url.rstrip("/")
        added, removed = self.admin.added, self.admin.removed
        named = {member.lasting_name for member in self._members() if member.url == url}
        removed = tuple(each for each in removed if each not in (*named, url))
        if not named and url not in added:
            added = (*added, url)
        self._edit(wall_s, added, removed)
        return self.find_url(url)

    def remove(self, worker: Worker, wall_s: float) -> None:
        """Drains a worker, whatever its source says, until `add` takes it back. Until then it stays
        as long as its source lists it; one that the admin API added, as long as it answers."""
        there = {*self.admin.added, *(member.lasting_name for member in self._members())}
        removed = [*dict.fromkeys((*self.admin.removed, worker.member.lasting_name))]
        # Other balancers may list what is not there: only as many of those as the bound allows.
        elsewhere = [name for name in removed if name not in there]
        forgotten = elsewhere[: max(len(elsewhere) - MOST_ELSEWHERE, 0)]
        removed = [name for name in removed if name not in forgotten]
        self._edit(wall_s, self.admin.added, tuple(removed))

    def forget_silent(self, wall_s: float) -> None:
        """Removes the workers that the admin API added and drained, and that answer no longer. Call
        it periodically."""
        silent = {
            worker.url
            for worker in self.all
            if worker.source == ADMIN and worker.state == "drained" and not worker.is_reachable
        }
        if silent:
            added, removed = self.admin.added, self.admin.removed
            self._edit(
                wall_s,
                tuple(url for url in added if url not in silent),
                tuple(name for name in removed if name not in silent),
            )

    def _edit(self, wall_s: float, added: tuple[str, ...], removed: tuple[str, ...]) -> None:
        """An edit is later than the one before it, even after a step back of the clock."""
        wall_s = max(wall_s, nextafter(self.admin.changed_s, inf))
        self.change(AdminChanges(wall_s, added, removed))

    def set_tiers(self, worker: Worker, *, has_host: bool, machine: str) -> None:
        """Gives the slower tiers of a worker slots: that of its host, and that of its machine's
        shared tier, which all workers of the machine have. `machine`: "" if it did not say."""
        name = f"{worker.id}\n{worker.url}"
        if has_host and worker.host_slot is None:
            host_slot = self._slots.take(f"{name}\n{Tier.HOST}")
            worker.set_tiers(host_slot, worker.machine, worker.shared_slot)
        if machine and machine != worker.machine:
            self._leave_machine(worker)
            slots = (w.shared_slot for w in self.all if w.machine == machine)
            slot = next(slots, None)
            if slot is None:
                slot = self._slots.take(f"{machine}\n{Tier.SHARED}")
            worker.set_tiers(worker.host_slot, machine, slot)
        self._index()

    def set_role(self, worker: Worker, stated: str) -> None:
        """Takes over the role that a worker states: `prefill PORT`, `decode` or nothing."""
        before = worker.role
        worker.set_role(stated)
        if worker.role != before:
            self._index()

    def set_ranks(self, worker: Worker, ranks: int) -> list[Worker]:
        """Makes each data-parallel rank of an engine a worker, as its rank 0 found that it has so
        many; returns those that are new."""
        engine = (worker.member.id, worker.url)
        if worker.rank or ranks == self._ranks.get(engine, 1) or not 1 <= ranks <= MOST_RANKS:
            return []
        log.info("engine has data-parallel ranks", extra={**_named(worker), "ranks": ranks})
        before = {*self.all}
        worker.has_ranks = ranks > 1
        self._ranks[engine] = ranks
        self._update(worker.recovered_s)
        return [each for each in self.all if each not in before]

    def remove_drained(self) -> None:
        """Removes the workers that leave and whose requests have ended. Call it periodically."""
        for worker in self.all:
            if worker.report and worker.state == "drained":
                worker.clear_load()  # it is not heard any more
        leaving = [worker for worker in self.all if worker.is_gone and not worker.in_flight]
        if not leaving:
            return
        self.all = [worker for worker in self.all if not worker.is_gone or worker.in_flight]
        self._index()
        for worker in leaving:
            log.info("engine gone", extra=_named(worker))
            self._left(worker)
            self._slots.give_back(worker.slot)
            if worker.host_slot is not None:
                self._slots.give_back(worker.host_slot)
            self._leave_machine(worker)
            if not worker.rank:
                self._ranks.pop((worker.member.id, worker.url), None)
            self._metrics.workers_left.inc()
            if worker.id not in self._by_id:
                self._metrics.forget_worker(worker.id)

    def _leave_machine(self, worker: Worker) -> None:
        is_last = not any(w.machine == worker.machine for w in self.all if w is not worker)
        if worker.shared_slot is not None and is_last:
            self._slots.give_back(worker.shared_slot)
        worker.set_tiers(worker.host_slot, "", None)

    def mark(self, worker: Worker, *, ready: bool, cause: str = "") -> None:
        """Records whether a worker is ready, as a probe or a request found, and why not."""
        if ready and not worker.ready:
            log.info("engine ready", extra=_named(worker))
            # A worker that was there from the start has a warm cache; one that comes later has not.
            worker.recovered_s = self._clock() if worker.recovered_s is not None else None
            worker.breaker.succeeded()
            worker.heard(self._clock())
        elif worker.ready and not ready:
            self._metrics.worker_outages.inc()
            worker.unready_s = worker.stopped_s(self._clock())
            log.warning("engine unreachable", extra={**_named(worker), "cause": cause})
            worker.recovered_s = self._clock()
            self._left(worker)
        elif not ready and cause and not worker.cause:
            log.info("engine not ready yet", extra={**_named(worker), "cause": cause})
        worker.ready, worker.cause = ready, cause or worker.cause
        self._slots.mark(worker.slot, ready=ready)
        worker.is_stalled = worker.is_stalled and ready
        worker.was_ready = worker.was_ready or ready

    def is_ready_in_all(self, worker: Worker) -> bool:
        """Whether each process of this balancer finds a worker ready: a request may reach any. The
        processes probe on their own, so some find it up to a second later."""
        return worker.ready and self._slots.all_ready(worker.slot)

    def note_secret(self, worker: Worker, *, refused: bool) -> None:
        """Records whether a worker refuses the engine secret, as a probe or a request found."""
        if refused is not worker.refuses_secret:
            verb = "refuses" if refused else "accepts"
            log.warning("%s %s the engine-secret of this balancer", worker.id, verb)
        worker.refuses_secret = refused
        if refused:
            self.mark(worker, ready=False, cause="it refuses the engine-secret")

    def _members(self) -> Iterable[Member]:
        return (member for members in self._lists.values() for member in members)

    def _update(self, joined_s: float | None) -> None:
        listed, ignored = merge(self._lists, self.admin)
        known = {(worker.id, worker.url): worker for worker in self.all}
        listed_ranks = [
            (member, source, rank)
            for member, source in listed
            for rank in range(self._ranks.get((member.id, member.url), 1))
        ]
        drained = {worker for worker in self.all if worker.draining}
        for worker in self.all:
            worker.is_gone = worker.draining = True
            worker.is_expected = False
        for member, source, rank in listed_ranks:
            name = (rank_id(member.id, rank), member.url)
            worker = known.get(name) or self._join(member, rank, joined_s)
            worker.is_gone, worker.draining = False, member.state != "ready"
            worker.is_expected = member.state == "restarting"
            worker.member, worker.source = member, source
        for worker in self.all:
            if worker.draining and worker not in drained:
                log.info("engine draining", extra=_named(worker))
        self._index()
        self.remove_drained()
        for message in ignored:
            if message not in self._ignored:
                log.warning("%s", message)
        self._ignored = {*ignored}

    def _index(self) -> None:
        self.index()
        for action in self.on_change:
            action()

    def _join(self, member: Member, rank: int, joined_s: float | None) -> Worker:
        slot = self._slots.take(f"{rank_id(member.id, rank)}\n{member.url}")
        worker = Worker(member, slot, rank=rank)
        worker.recovered_s = joined_s
        self._metrics.workers_joined.inc()
        self.all.append(worker)
        log.info("engine added", extra=_named(worker))
        return worker

    def _left(self, worker: Worker) -> None:
        for action in self.on_leave:
            action(worker)


def _named(worker: Worker) -> dict[str, str]:
    """What a line of the log says of the worker that it is about."""
    return {"engine": worker.id, "url": worker.url}


RETRY_S = 1.0


class _Followed:
    """A source, how many workers its last list has, and why it has no newer one."""

    def __init__(self, source: Membership) -> None:
        self.source = source
        self.count: int | None = None
        self.fault = ""
        self.tried = asyncio.Event()


class WorkerSources(Collector):
    """A task for each source. A source that fails keeps its last list, and is tried again."""

    def __init__(
        self,
        sources: Sequence[Membership],
        workers: Workers,
        metrics: Metrics,
        retry_s: float = RETRY_S,
    ) -> None:
        self._workers = workers
        self._metrics = metrics
        self._retry_s = retry_s
        self._all = [_Followed(source) for source in sources]
        self._tasks: list[asyncio.Task[None]] = []
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        help_text = "Whether a source of workers cannot be read now, so that its last list stays."
        family = GaugeMetricFamily("sgl_ext_membership_stale", help_text, labels=["source"])
        for each in self._all:
            family.add_metric([each.source.name], bool(each.fault) or each.count is None)
        yield family

    def rows(self) -> list[dict[str, Any]]:
        """Each source: its name, how many workers it lists, None before its first list, and why it
        cannot be read, "" if it can."""
        return [
            {"name": each.source.name, "workers": each.count, "fault": each.fault}
            for each in self._all
        ]

    def start(self) -> None:
        """Follows the sources from now on."""
        failed = self._metrics.background_failed
        self._tasks = [
            asyncio.create_task(
                supervise("membership", failed, partial(self._follow, each), self._retry_s)
            )
            for each in self._all
        ]

    async def wait_until_tried(self, timeout_s: float) -> None:
        """Waits until each source has given its first list or failed, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for each in self._all:
                    await each.tried.wait()

    async def close(self) -> None:
        """Follows the sources no longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, each: _Followed) -> None:
        """Applies the lists of a source until it fails or ends."""
        try:
            async for members in each.source.lists():
                self._apply(each, members)
        except MembershipError as error:
            self._failed(each, str(error))
        except Exception as error:
            self._failed(each, f"{type(error).__name__}: {error}")
            raise
        finally:
            each.tried.set()

    def _apply(self, each: _Followed, members: tuple[Member, ...]) -> None:
        name = each.source.name
        if each.fault:
            log.warning("%s: can be read again", name)
        if not members and each.count != 0:
            log.warning("%s: lists no workers", name)
        each.fault, each.count = "", len(members)
        self._workers.apply(name, members)
        each.tried.set()

    def _failed(self, each: _Followed, fault: str) -> None:
        self._metrics.membership_faults.counts[(each.source.name,)] += 1
        if fault != each.fault:
            stays = "there is no list yet" if each.count is None else "its last list stays"
            log.warning("%s: %s; %s", each.source.name, fault, stays)
        each.fault = fault
