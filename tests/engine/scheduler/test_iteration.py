"""When events are published and orders are carried out, in SGLang's own event loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.load_cost import PRIOR
from sgl_ext.engine.scheduler import iteration
from sgl_ext.engine.scheduler.event_publisher import EventPublisher
from sgl_ext.engine.scheduler.extension import extension_of
from sgl_ext.wire.orders import Orders
from tests.engine.core.test_shared_prefixes import sglang
from tests.engine.http.test_event_broadcaster import Cache, Pipe
from tests.engine.http.test_event_broadcaster import Scheduler as WithLoad

PREFILL, DECODE = True, False


class Batch(SimpleNamespace):
    """A batch of one request. It is false if SGLang's is: never."""

    def __init__(self, is_prefill: bool) -> None:
        mode = SimpleNamespace(is_extend=lambda: is_prefill, is_decode=lambda: not is_prefill)
        req = SimpleNamespace(finished=lambda: False, host_loaded_length=0)
        super().__init__(forward_mode=mode, reqs=[req], extend_num_tokens=5)

    def copy(self) -> Batch:
        return Batch(self.forward_mode.is_extend())


class Looping(WithLoad):
    """SGLang's scheduler, as far as its loops see it. It runs these batches, None for an idle
    iteration, and then ends. log: what it did."""

    def __init__(self, batches: list[Batch | None]) -> None:
        super().__init__()
        self.tree_cache: Any = Cache()
        self.log: list[str] = []
        self._batches = deque(batches)
        self._engine_paused = self.enable_unified_memory = False
        self.is_generation = False
        self.running_batch: Any = SimpleNamespace(reqs=[])
        self.last_batch: Batch | None = None
        self.require_mlp_sync = False
        extension = extension_of(self.tree_cache)
        extension.is_entry_rank = True
        pipe = Pipe()
        extension.publisher = EventPublisher(self, self.tree_cache, pipe)
        publish = extension.publisher.publish

        def logged(*args: Any, **kw: Any) -> None:
            self.log.append("published")
            publish(*args, **kw)

        extension.publisher.publish = logged

    @property
    def gracefully_exit(self) -> bool:
        return not self._batches

    def ingest_requests(self) -> None:
        """None come."""

    def get_next_batch_to_run(self, **_: Any) -> Any:
        batch = self._batches.popleft()
        plan = SimpleNamespace(batch_to_run=batch, running_batch=self.running_batch)
        iteration.note_plan(plan, self)
        return plan

    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> bool:
        return bool(batch and last_batch) and batch.forward_mode.is_extend() is PREFILL

    def run_batch(self, _: Batch) -> None:
        self.log.append("launched")

    def process_batch_result(self, batch: Batch, result: Any) -> None:
        def send(*_: Any) -> None:
            self.log.append("sent")

        iteration.publish_events(send, self, batch, result)

    def on_idle(self) -> None:
        self.log.append("idle")

    def launch_batch_sample_if_needed(self, *_: Any) -> None: ...
    def _apply_war_barrier(self) -> None: ...


@pytest.fixture(scope="module")
def loops() -> dict[str, Callable[[Any], None]]:
    kind = sglang("managers.scheduler").Scheduler
    return {"normal": kind.event_loop_normal, "overlap": kind.event_loop_overlap}


def run(loop: Callable[[Any], None], *batches: Batch | None) -> list[str]:
    scheduler = Looping(list(batches))
    config = sglang("environ").envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY
    assert not config.get()
    loop(scheduler)
    return scheduler.log


@pytest.mark.parametrize("name", ["normal", "overlap"])
def test_no_output_waits_for_events(loops: Any, name: str) -> None:
    """With overlap, a batch's output is sent an iteration after the batch was decided."""
    batches = [Batch(PREFILL), Batch(DECODE), Batch(DECODE), None, None, Batch(PREFILL), None]
    log = run(loops[name], *batches, *[None] * 2)
    launched = sent = 0
    for what in log:
        launched += what == "launched"
        sent += what == "sent"
        if what == "published":
            # With overlap the next batch runs by then, whose output does not wait.
            assert launched - sent <= (name == "overlap"), log
    assert (launched, sent) == (4, 4)
    for at, what in enumerate(log):
        if what == "sent":
            assert log[at + 1] == "published", "what a batch changed is not held back"


def test_with_overlap_nothing_is_swept_for_an_idle_scheduler_before_the_last_output(
    loops: Any,
) -> None:
    log = run(loops["overlap"], Batch(DECODE), None, None)
    assert log == ["launched", "sent", "published", "published", "idle"]


@pytest.fixture
def scheduler() -> Any:
    """One that receives in every third iteration, as with --scheduler-recv-interval 3."""
    found = SimpleNamespace(
        tree_cache=Cache(),
        waiting_queue=[],
        running_batch=SimpleNamespace(is_empty=lambda: True),
        handled=[],
        polls=0,
    )
    extension_of(found.tree_cache).is_entry_rank = True
    return found


def ingest(scheduler: Any, wanted: Orders, *, receives: bool) -> None:
    """What `Scheduler.ingest_requests` does. A poll that is skipped returns nothing, and drops what
    it was given to broadcast."""
    extension_of(scheduler.tree_cache).orders = SimpleNamespace(
        take=lambda earlier: earlier.and_then(wanted)
    )
    given = iteration.send_orders([], scheduler)
    handle = partial(lambda scheduler, requests: scheduler.handled.extend(requests))
    iteration.take_orders(handle, scheduler, given if receives else [])


def test_orders_survive_polls_that_are_skipped(scheduler: Any) -> None:
    done: list[Any] = []
    scheduler.tree_cache.pins.release_named = done.append
    extension_of(scheduler.tree_cache).change = done.append
    none = Orders((), {})
    ingest(scheduler, Orders(("a",), {"x": 1}), receives=False)
    ingest(scheduler, Orders(("b",), {"y": 2}), receives=False)
    assert done == []
    ingest(scheduler, none, receives=True)
    assert done == [("a", "b"), {"x": 1, "y": 2}]
    ingest(scheduler, none, receives=True)
    assert done == [("a", "b"), {"x": 1, "y": 2}], "no order is carried out twice"


def test_all_ranks_take_what_was_measured_from_an_order(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of an idle engine, which has no other reason to send one."""
    now_s = iter(range(1000, 2000, 100))
    monkeypatch.setattr(iteration, "clock_s", lambda: next(now_s))
    extension, none = extension_of(scheduler.tree_cache), Orders((), {})
    ingest(scheduler, none, receives=True)
    assert (extension.load_share, iteration.send_orders([], scheduler)) == (PRIOR, [])
    scheduler.tree_cache.loads.cost.share = 0.25
    assert extension.load_share == PRIOR, "a rank does not decide by what it measured itself"
    ingest(scheduler, none, receives=True)
    assert extension.load_share == 0.25
    assert iteration.send_orders([], scheduler) == []
    scheduler.tree_cache.loads.cost.token_s = 0.002
    ingest(scheduler, none, receives=True)
    assert (extension.load_share, extension.token_s) == (0.25, 0.002)
    assert iteration.send_orders([], scheduler) == []
