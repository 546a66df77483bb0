"""Announcing what the tier that engines share holds: once, whichever engines there are.

Prefix events between the scheduler and a subscriber, without an engine.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from radix.residency import Residency
from radix.tiered_pins import TieredPins
from scheduler.load_cost import PRIOR
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.http import event_broadcaster
from sgl_ext.engine.http.event_broadcaster import EventBroadcaster, SharedAnnouncer
from sgl_ext.engine.scheduler import event_publisher
from sgl_ext.engine.scheduler.event_publisher import EventPublisher
from sgl_ext.engine.scheduler.pins import PinKeeper
from sgl_ext.engine.tiers.host_tier import Loads
from sgl_ext.wire import events
from sgl_ext.wire.hints import Hints
from tests.engine.tiers.test_segment_notes import KEYS, SEGMENTS, Engine, root
from tests.waiting import HANG_S

__all__ = ["root"]
ROWS = [
    [f"{segment:032x}", None if parent is None else f"{parent:032x}", tokens]
    for segment, parent, tokens in SEGMENTS
]


@pytest.fixture
def engine(root: Path) -> Engine:
    """An engine that has stored three segments."""
    engine = Engine(root)
    engine.store(KEYS)
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(5)
    return engine


@pytest.fixture
def two(engine: Engine) -> Iterator[list[SharedAnnouncer]]:
    """Two engines' parts in announcing."""
    both = [SharedAnnouncer(engine.pages.path) for _ in range(2)]
    yield both
    for each in both:
        each.close()


def test_one_engine_announces_what_all_stored(engine: Engine, two: list[SharedAnnouncer]) -> None:
    first, second = two
    assert first.step() == [{"shared_cleared": True}, {"shared": ROWS}]
    assert (first.step(), second.step(), len(first)) == ([], [], 3)
    engine.pages.drop(KEYS[1])
    assert first.step() == [{"shared_removed": [ROWS[1][0]]}], "and with it what is below"
    engine.store(KEYS)
    assert first.step() == [{"shared": ROWS[1:]}]
    assert second.step() == []


def test_when_it_ends_another_engine_goes_on_from_nothing(engine: Engine) -> None:
    first, second = (SharedAnnouncer(engine.pages.path) for _ in range(2))
    assert first.step()
    engine.pages.drop(KEYS[2])
    assert second.step() == []
    first.close()
    assert second.step() == [{"shared_cleared": True}, {"shared": ROWS[:2]}]
    second.close()


async def test_a_balancer_is_sent_it_by_one_engine_at_once_or_with_a_snapshot(
    engine: Engine, root: Path
) -> None:
    both = [EventBroadcaster() for _ in range(2)]
    readers = [Reader(each) for each in both]
    for reader in readers:
        await reader.have(2)
    for broadcaster in both:
        first = {"publishes": ["prefixes", "host", "load"], "machine": "m"}
        broadcaster.apply(line(**first, shared_pages=str(engine.pages.path)))
        await broadcaster.announce()
    await readers[0].have(5)
    await readers[1].have(3)
    assert readers[1].lines[2] == {"seq": 2, **first}, "without the path"
    assert [row.get("shared") for row in readers[0].lines[3:]] == [None, ROWS]
    engine.pages.drop(KEYS[2])
    for broadcaster in both:
        await broadcaster.announce()
    readers += [Reader(each) for each in both]
    await readers[2].have(3)
    await readers[3].have(2)
    snapshot, stored, last = readers[2].lines
    assert (snapshot["machine"], snapshot["shared_cleared"]) == ("m", True)
    assert (stored["shared"], last["complete"]) == (ROWS[:2], True)
    assert readers[3].lines[0]["machine"] == "m"
    assert "shared_cleared" not in readers[3].lines[0]
    assert {"shared_segments"} <= {table for table, *_ in both[0].tables()}
    for each in readers:
        each.left.set()
        await each.task


A, B, C = (f"{number:032x}" for number in (0xA, 0xB, 0xC))
LOAD = {"running": 1, "queued": 0, "pending_tokens": 0}


class Reader:
    """An ASGI server's side of one stream. `stalled`: it takes no bytes."""

    def __init__(self, broadcaster: EventBroadcaster, stalled: bool = False) -> None:
        self.lines: list[dict[str, Any]] = []
        self.status = 0
        self.complete = False
        self.left = asyncio.Event()
        self._stalled = stalled
        self._read = asyncio.Event()
        self.task = asyncio.create_task(broadcaster({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            assert (b"content-type", b"application/x-ndjson") in message["headers"]
            assert b"content-length" not in dict(message["headers"])
            return
        if self._stalled:
            await asyncio.Event().wait()
        self.lines += map(orjson.loads, message["body"].splitlines())
        self.complete = not message.get("more_body", False)
        self._read.set()

    async def have(self, lines: int) -> None:
        """Waits until so many lines were read."""
        while len(self.lines) < lines:
            self._read.clear()
            await self._read.wait()


@contextmanager
def counted(name: str, by: int) -> Iterator[None]:
    before = counter(name)._value.get()
    yield
    assert counter(name)._value.get() == before + by


def line(**keys: Any) -> bytes:
    return orjson.dumps(keys)


async def test_a_quiet_stream_sends_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_broadcaster, "QUIET_S", 0.01)
    reader = Reader(EventBroadcaster())
    await reader.have(4)
    assert reader.lines[2:4] == [{"seq": 2, "alive": True}, {"seq": 3, "alive": True}]
    reader.left.set()
    await reader.task


async def test_a_subscriber_gets_a_snapshot_and_then_every_line() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.apply(line(stored=[[A, None, 5], [B, A, 9]], load=LOAD))
    reader = Reader(broadcaster)
    await reader.have(3)
    broadcaster.apply(line(removed=[B], stored=[[C, A, 7]]))
    broadcaster.apply(line(load={**LOAD, "queued": 2}))
    await reader.have(5)
    assert reader.status == 200
    assert reader.lines == [
        {"seq": 0, "snapshot": True, "cleared": True, "publishes": [], "load": LOAD},
        {"seq": 1, "stored": [[A, None, 5], [B, A, 9]]},
        {"seq": 2, "complete": True},
        {"seq": 3, "removed": [B], "stored": [[C, A, 7]]},
        {"seq": 4, "load": {**LOAD, "queued": 2}},
    ]
    reader.left.set()
    await reader.task


async def test_subscribers_learn_with_what_the_engine_does_less() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.degraded = ("LMCache",)
    reader = Reader(broadcaster)
    await reader.have(2)
    broadcaster.close()
    await reader.task
    assert [read.get("degraded") for read in reader.lines] == [["LMCache"], None]


async def test_subscribers_learn_which_caches_are_off() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.show_caches_off([])
    first = Reader(broadcaster)
    await first.have(2)
    for _ in range(2):
        broadcaster.show_caches_off(["tokens"])
    later = Reader(broadcaster)
    await later.have(2)
    broadcaster.show_caches_off([])
    await first.have(4)
    await later.have(3)
    broadcaster.close()
    await asyncio.gather(first.task, later.task)
    shown = [(read["seq"], read.get("caches_off")) for read in first.lines]
    assert shown == [(0, None), (1, None), (2, ["tokens"]), (3, [])]
    assert [read.get("caches_off") for read in later.lines] == [["tokens"], None, []]


async def test_a_tier_that_is_off_is_shown_with_the_caches() -> None:
    broadcaster = EventBroadcaster()
    first = Reader(broadcaster)
    await first.have(2)
    broadcaster.show_caches_off(["tokens"])
    broadcaster.apply(line(tiers_off=["shared tier (full)"]))
    broadcaster.show_caches_off(["tokens"])
    broadcaster.show_caches_off([])
    broadcaster.apply(line(tiers_off=[]))
    await first.have(6)
    broadcaster.close()
    await first.task
    shown = [read["caches_off"] for read in first.lines if "caches_off" in read]
    off = "shared tier (full)"
    assert shown == [["tokens"], ["tokens", off], [off], []]
    assert not any("tiers_off" in read for read in first.lines)


async def test_who_ends_the_engine_learns_that_all_is_stored() -> None:
    broadcaster = EventBroadcaster()
    assert not broadcaster.has_shared_tier
    broadcaster.apply(line(publishes=[], shared_pages="/tier/kv-1"))
    assert broadcaster.has_shared_tier
    assert not broadcaster.stored_all.is_set()
    broadcaster.apply(line(stored_all=True))
    assert broadcaster.stored_all.is_set()


async def test_a_later_subscriber_gets_the_state_after_all_lines() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.apply(line(stored=[[A, None, 5], [B, A, 9], [C, B, 12]]))
    broadcaster.apply(line(removed=[B], load=LOAD))
    reader = Reader(broadcaster)
    await reader.have(2)
    assert reader.lines[0]["load"] == LOAD
    assert reader.lines[1]["stored"] == [[A, None, 5]]
    broadcaster.close()
    await reader.task
    broadcaster.apply(line(cleared=True))
    reader = Reader(broadcaster)
    await reader.have(2)
    broadcaster.close()
    await reader.task
    assert reader.lines[1:] == [{"seq": 1, "complete": True}]


async def test_a_long_snapshot_is_split_and_loses_no_event_sent_meanwhile() -> None:
    broadcaster = EventBroadcaster()
    segments = [f"{number:032x}" for number in range(1, 2501)]
    broadcaster.apply(line(stored=[[segment, None, 1] for segment in segments]))
    reader = Reader(broadcaster)
    await reader.have(2)
    broadcaster.apply(line(stored=[[A, None, 2]], removed=[B]))
    await reader.have(6)
    assert [line["seq"] for line in reader.lines] == [0, 1, 2, 3, 4, 5]
    stored = [segment for line in reader.lines[:4] for segment, *_ in line.get("stored", ())]
    assert sorted(stored) == segments
    assert reader.lines[4]["complete"]
    assert reader.lines[5]["stored"] == [[A, None, 2]]
    broadcaster.close()
    await reader.task


async def test_a_slow_subscriber_is_dropped_and_counted() -> None:
    broadcaster = EventBroadcaster(buffer_bytes=200)
    stalled, good = Reader(broadcaster, stalled=True), Reader(broadcaster)
    await good.have(2)
    with counted("slow_event_subscribers", 1):
        for _ in range(4):
            broadcaster.apply(line(load=LOAD, removed=[A]))
            await asyncio.sleep(0)
        await stalled.task
    assert not stalled.complete
    await good.have(6)
    broadcaster.close()
    await good.task
    assert good.complete


async def test_a_stream_that_fails_ends_is_counted_and_harms_no_other() -> None:
    broadcaster = EventBroadcaster()
    good = Reader(broadcaster)
    await good.have(2)
    failures = counter("background_failures").labels("event_streams")._value
    before = failures.get()

    async def fail(message: Any) -> None:
        if message.get("body"):
            raise RuntimeError("no answer can be sent")

    async with asyncio.timeout(HANG_S):
        await broadcaster({"type": "http"}, asyncio.Event().wait, fail)
    assert failures.get() == before + 1
    broadcaster.apply(line(load=LOAD))
    await good.have(3)
    broadcaster.close()
    await good.task


async def test_a_wrong_line_is_rejected_and_leaves_the_mirror_unchanged() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.apply(line(stored=[[A, None, 5]]))
    with pytest.raises(ValueError, match="not held"):
        broadcaster.apply(line(stored=[[C, B, 5]]))
    reader = Reader(broadcaster)
    await reader.have(2)
    assert reader.lines[1]["stored"] == [[A, None, 5]]
    broadcaster.close()
    await reader.task


class Pipe:
    """The channel, with a switch."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.room = 1 << 30

    def send(self, line: dict[str, Any]) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.lines.append(orjson.loads(orjson.dumps(line)))
        return True

    def take(self) -> list[dict[str, Any]]:
        lines, self.lines = self.lines, []
        return lines


class Scheduler:
    """The attributes that load is computed from."""

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.max_running_requests = 8
        self.max_req_len = 64
        self.total_prefill_uncached_tokens, self.total_prefill_busy_us = 700, 9900
        self.used = 0
        stats = SimpleNamespace(get_kv_token_stats=lambda: (self.used, 0.0))
        self.load_inquirer = SimpleNamespace(
            get_num_waiting_uncached_tokens=lambda: 10 * len(self.waiting_queue),
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: stats),
            max_total_num_tokens=100,
        )


def plan(running: int, prefill: int = 0, tokens: int = 0, ended: int = 0) -> Any:
    reqs = [SimpleNamespace(finished=lambda at=at: at < ended) for at in range(running + prefill)]
    batch = SimpleNamespace(reqs=reqs[:running])
    new = SimpleNamespace(reqs=reqs[running:], extend_num_tokens=tokens) if prefill else None
    return SimpleNamespace(running_batch=batch, batch_to_run=new or (batch if running else None))


def publish(
    sender: EventPublisher,
    decided: Any,
    now_s: float,
    computed: Any = None,
    load_share: float = PRIOR,
) -> None:
    """Publishes after the output of a batch, with what the scheduler has decided by then."""
    sender.plan = decided
    sender.publish(now_s, computed, load_share)


class Cache:
    def __init__(self) -> None:
        self.residency = Residency()
        self.pins = PinKeeper(self, TieredPins(budget_tokens=100), page=1, is_entry_rank=True)
        self.cache_controller: Any = None
        self.host_tokens = 0
        self.loads = Loads()

    def match_until(self, _: Any, tokens: int) -> tuple[int, int]:
        return tokens, 1

    def lock(self, node: int) -> int:
        return node

    def unlock(self, lock: int) -> None:
        """Nothing is evicted here."""

    def sweep(self, steps: int) -> None:
        """Nothing was evicted."""


def add(cache: Cache, segment: int, tokens: int = 5) -> None:
    cache.residency.add([segment], [1], key=range(tokens), resident=tokens, node=1, had=0)


def pin(cache: Cache, ttl_s: float = 300.0) -> None:
    prompt = array("q", range(10))
    request = SimpleNamespace(
        origin_input_ids=prompt, extra_key=None, cache_salt=None, cached_tokens=0, kv_hints=None
    )
    hints = Hints(
        hashes=(0xA,),
        ends=(40,),
        pins=((10, ttl_s),),
        owner="o",
        session="s",
        sent_s=5.0,
        is_reusable=True,
        is_last=False,
        is_answer_reusable=True,
    )
    cache.pins.prompt_stored(request, hints, 10)


def test_pins_are_published_and_sent_again_like_segments() -> None:
    cache, pipe = Cache(), Pipe()
    sender = EventPublisher(Scheduler(), cache, pipe)
    pin(cache)
    publish(sender, plan(1), now_s=0.0)
    (event,) = pipe.take()
    (row,) = event["pinned"]
    assert row == {
        "prefix": row["prefix"],
        "segment": A,
        "tokens": 10,
        "ttl_s": 300.0,
        "left_s": 300.0,
        "tier": "device",
        "hits": 0,
        "owner": "o",
        "session": "s",
    }
    assert event["load"]["pinned_tokens"] == 10
    pipe.room = 0
    with counted("event_lines_dropped", 1):
        publish(sender, plan(2), now_s=1.0)
    pipe.room = 9
    publish(sender, plan(2), now_s=2.0)
    assert [line.get("pinned") for line in pipe.take()] == [None, [row]]
    cache.pins.advance(1000.0)
    publish(sender, plan(2), now_s=3.0)
    assert pipe.take()[0]["unpinned"] == [row["prefix"]]


def test_changes_are_published_once_and_load_when_it_changed() -> None:
    cache, pipe, scheduler = Cache(), Pipe(), Scheduler()
    sender = EventPublisher(scheduler, cache, pipe)
    add(cache, 0xA)
    publish(sender, plan(1), now_s=0.0)
    idle = {
        "pending_tokens": 0,
        "used_tokens": 0,
        "pinned_tokens": 0,
        "capacity_tokens": 100,
        "max_running": 8,
        "context_tokens": 64,
        "prefill_tokens": 700,
        "prefill_ms": 9,
        "pin_budget_tokens": 100,
        "pins_declined": {},
    }
    load = {"running": 1, "queued": 0, **idle}
    publishes = ["prefixes", "load"]
    assert pipe.take() == [{"stored": [[A, None, 5]], "publishes": publishes, "load": load}]
    publish(sender, plan(2, prefill=1, tokens=700), now_s=0.05)  # too soon
    assert pipe.take() == []
    scheduler.waiting_queue.append(None)
    publish(sender, plan(2, prefill=1, tokens=700), now_s=0.11)
    load = {**idle, "pending_tokens": 710}
    assert pipe.take() == [{"load": {"running": 3, "queued": 1, **load}}]
    scheduler.waiting_queue.clear()
    publish(sender, plan(0), now_s=0.12)  # soon, but an idle scheduler may sleep
    assert pipe.take() == [{"load": {"running": 0, "queued": 0, **idle}}]
    publish(sender, plan(0), now_s=5.0)
    assert pipe.take() == []


def test_while_the_same_requests_decode_the_load_is_counted_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, scheduler, counts = Pipe(), Scheduler(), list[float]()
    sender, decoding = EventPublisher(scheduler, Cache(), pipe), plan(3)
    load_of = event_publisher.load_of

    def counted_load(*args: Any) -> dict[str, int]:
        counts.append(now_s)
        return load_of(*args)

    monkeypatch.setattr(event_publisher, "load_of", counted_load)
    for now_s in (0.0, 0.2, 0.4, 0.6, 0.8):
        scheduler.used += 1
        publish(sender, decoding, now_s)
    assert counts == [0.0]
    for now_s in (1.1, 1.3):
        publish(sender, decoding, now_s)
    assert counts == [0.0, 1.1]
    assert [line["load"]["used_tokens"] for line in pipe.take()] == [1, 5]
    decoding.running_batch.reqs.pop()  # one has ended
    now_s = 1.5
    publish(sender, decoding, now_s)
    scheduler.waiting_queue.append(None)
    now_s = 1.7
    publish(sender, decoding, now_s)
    loads = [line["load"] for line in pipe.take()]
    assert [(load["running"], load["queued"]) for load in loads] == [(2, 0), (2, 1)]


def test_a_prefill_is_pending_until_it_is_computed_and_ended_requests_do_not_run() -> None:
    pipe = Pipe()
    sender = EventPublisher(Scheduler(), Cache(), pipe)
    decided = plan(3, prefill=1, tokens=20, ended=2)
    publish(sender, decided, now_s=0.0, computed=plan(3).running_batch)
    publish(sender, decided, now_s=1.0, computed=decided.batch_to_run)
    loads = [line["load"] for line in pipe.take()]
    assert [(load["running"], load["pending_tokens"]) for load in loads] == [(2, 20), (2, 0)]


def test_what_waiting_prompts_will_load_is_pending_at_its_share() -> None:
    scheduler, cache, pipe = Scheduler(), Cache(), Pipe()
    scheduler.waiting_queue = [SimpleNamespace(host_hit_length=n) for n in (0, 4000)]
    sender = EventPublisher(scheduler, cache, pipe)  # type: ignore[arg-type]
    publish(sender, plan(1), now_s=0.0)
    cache.cache_controller = SimpleNamespace(storage_backend=None)
    publish(sender, plan(1), now_s=1.0, load_share=0.05)
    publish(sender, plan(1), now_s=2.0, load_share=0.05)
    without, line = pipe.take()
    assert "load_share" not in without, "there is no host tier"
    assert line["load_share"] == 0.05
    assert line["load"]["pending_tokens"] == without["load"]["pending_tokens"] + 200


def test_one_call_publishes_a_bounded_part_and_the_next_ones_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_publisher, "_SEGMENTS", 3)
    cache, pipe, steps = Cache(), Pipe(), list[int]()
    monkeypatch.setattr(cache, "sweep", steps.append)
    sender = EventPublisher(Scheduler(), cache, pipe)
    for segment in range(40):
        add(cache, segment)

    def sent() -> int:
        return sum(len(line.get("stored", ())) for line in pipe.take())

    publish(sender, plan(1), now_s=0.0)
    assert sent() == 3
    publish(sender, plan(0), now_s=0.0)
    assert sent() == 30, "an idle scheduler does more, and not all"
    assert steps == [2000, 20000]
    pipe.room = 0
    publish(sender, plan(2), now_s=1.0)
    pipe.room = 99
    total = [sent() for _ in range(15) if publish(sender, plan(2), now_s=2.0) is None]
    assert (sum(total), max(total)) == (40, 3), "what is sent again is sent in parts, too"


def test_a_chunk_is_pending_once() -> None:
    scheduler = Scheduler()
    scheduler.chunked_req = SimpleNamespace(extend_end=30, prefix_len=10)
    scheduler.waiting_queue = [None] * 5  # stands for 50 tokens, the chunked rest among them
    assert (
        event_publisher.load_of(scheduler, plan(0, prefill=2, tokens=25), 0)["pending_tokens"] == 55
    )


def test_after_a_dropped_line_everything_is_sent_again() -> None:
    cache, pipe, scheduler = Cache(), Pipe(), Scheduler()
    sender = EventPublisher(scheduler, cache, pipe)
    add(cache, 0xA)
    publish(sender, plan(1), now_s=0.0)
    pipe.take()
    pipe.room = 0
    add(cache, 0xB)
    with counted("event_lines_dropped", 1):
        publish(sender, plan(1), now_s=0.0)
        add(cache, 0xC)
        publish(sender, plan(1), now_s=0.0)
    pipe.room = 1
    with counted("event_lines_dropped", 1):
        publish(sender, plan(1), now_s=0.0)  # room for the first line alone
    pipe.room = 9
    publish(sender, plan(1), now_s=0.0)
    first, second = pipe.take()[1:]
    assert first == {"cleared": True}
    assert second["stored"] == [[A, None, 5], [B, None, 5], [C, None, 5]]
    assert second["load"]["running"] == 1
    publish(sender, plan(1), now_s=0.0)
    assert pipe.take() == []


def test_without_our_cache_only_load_is_published() -> None:
    pipe = Pipe()
    sender = EventPublisher(Scheduler(), None, pipe)
    pipe.room = 0
    publish(sender, plan(1), now_s=0.0)
    pipe.room = 9
    publish(sender, plan(1), now_s=1.0)
    cleared, loaded = pipe.take()
    assert cleared == {"cleared": True}
    assert loaded.keys() == {"publishes", "load"}
    assert loaded["publishes"] == ["load"]


def test_in_a_pipeline_the_requests_of_all_micro_batches_are_running() -> None:
    def request(ended: bool) -> SimpleNamespace:
        return SimpleNamespace(finished=lambda: ended, rid="r")

    class Pipeline(Scheduler):
        def collect_inflight_reqs(self) -> list[SimpleNamespace]:
            return [request(False), request(False), request(True)]

    for stages, running in ((1, 1), (2, 2)):
        pipe = Pipe()
        publish(EventPublisher(Pipeline(), None, pipe, stages), plan(1), now_s=0.0)
        (loaded,) = pipe.take()
        assert loaded["load"]["running"] == running


async def test_a_later_subscriber_learns_what_is_published() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.apply(line(publishes=["load"], load=LOAD))
    broadcaster.apply(line(load={**LOAD, "queued": 1}))
    reader = Reader(broadcaster)
    await reader.have(2)
    assert reader.lines[0]["publishes"] == ["load"]
    reader.left.set()
    await reader.task


def test_a_clear_and_stored_segments_go_in_one_line() -> None:
    cache, pipe = Cache(), Pipe()
    sender = EventPublisher(Scheduler(), cache, pipe)
    cache.residency.clear()
    add(cache, 0xA)
    publish(sender, plan(1), now_s=0.0)
    (event,) = pipe.take()
    assert (event["cleared"], event["stored"]) == (True, [[A, None, 5]])


def test_many_segments_go_in_lines_of_a_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LINE_SEGMENTS", 2)
    cache, pipe = Cache(), Pipe()
    for segment in (0xA, 0xB, 0xC):
        add(cache, segment)
    publish(EventPublisher(Scheduler(), cache, pipe), plan(1), now_s=0.0)
    assert [len(line.get("stored", ())) for line in pipe.take()] == [2, 1]


async def test_the_subscribers_are_counted() -> None:
    broadcaster = EventBroadcaster()

    assert broadcaster.subscriber_count == 0
    reader = Reader(broadcaster)
    await reader.have(1)
    assert broadcaster.subscriber_count == 1
    reader.left.set()
    await reader.task
    assert broadcaster.subscriber_count == 0


async def test_a_snapshot_has_the_slower_tiers_after_the_device() -> None:
    broadcaster = EventBroadcaster()
    broadcaster.apply(line(publishes=["prefixes", "host"], stored=[[A, None, 5], [B, A, 9]]))
    broadcaster.apply(line(removed=[B], host=[[B, A, 9]], machine="m", shared=[[B, A, 9]]))
    reader = Reader(broadcaster)
    await reader.have(5)
    assert reader.lines[0]["machine"] == "m"
    assert reader.lines[1:] == [
        {"seq": 1, "stored": [[A, None, 5]]},
        {"seq": 2, "host": [[B, A, 9]]},
        {"seq": 3, "shared": [[A, None, 5], [B, A, 9]]},
        {"seq": 4, "complete": True},
    ]
    broadcaster.apply(line(cleared=True))
    broadcaster.apply(line(shared_removed=[B]))
    again = Reader(broadcaster)
    await again.have(3)
    assert again.lines[1] == {"seq": 1, "shared": [[A, None, 5]]}
    for each in (reader, again):
        each.left.set()
        await each.task
