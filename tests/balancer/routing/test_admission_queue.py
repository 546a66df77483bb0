"""The admission queue: which requests wait, for how long, and when they are placed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from scheduler import admission_queue
from sgl_ext.balancer.metrics.registry import band
from sgl_ext.balancer.routing.admission_queue import HOME_WAIT_S, AdmissionQueue
from sgl_ext.balancer.routing.attempt import NO_ROUTING, Attempt, RoutingRequest
from sgl_ext.balancer.routing.worker import Load, Worker
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.routing.test_router import Setting


class QueuedRequest:
    """One that keeps what became of it."""

    def __init__(self, routing: RoutingRequest, let_in: list[QueuedRequest]) -> None:
        self.routing = routing
        self._let_in = let_in
        self.tried: set[Worker] = set()
        self.attempt: Attempt | None = None
        self.error: BalancerError | None = None

    def placed(self, attempt: Attempt) -> None:
        assert self.attempt is None
        self.attempt = attempt
        self._let_in.append(self)

    def rejected(self, error: BalancerError) -> None:
        self.error = error


class Held(Setting):
    """A door before workers that report room for two requests and one ahead each.

    let_in: those that had to wait, in the order in which they went.
    """

    def __init__(self, max_running: int = 2, limit: int = 100, **options: Any) -> None:
        super().__init__(**options)
        self.admission_queue = AdmissionQueue(
            self.router, self.metrics, limit, 60.0, aging_s=10.0, clock=self.clock
        )
        self.let_in: list[QueuedRequest] = []
        self._number = 0
        for worker in self.workers.all:
            self.report(worker, max_running=max_running)

    def report(self, worker: Worker, **load: int) -> None:
        """The engine tells its load."""
        told = {"capacity_tokens": 100_000, "max_running": 2, "queued": 0, **load}
        worker.apply_load(told, self.clock.now_s)
        self.router.capacity_changed()

    def come(
        self, routing: RoutingRequest | None = None, priority: int = 0, **headers: str
    ) -> QueuedRequest:
        """One more comes; each with a prompt that it shares with nobody unless it is given."""
        self._number += 1
        if routing is None:
            text = f"{self._number:09}"
            headers["x-sgl-ext-priority"] = str(priority)
            routing = self.ask(text, system=text * 10, **headers)
        caller = QueuedRequest(routing, self.let_in)
        if self.admission_queue.place(caller) and caller in self.let_in:
            self.let_in.remove(caller)
        return caller

    def fill(self, priority: int = 0) -> list[QueuedRequest]:
        """Requests come until one is held, which then leaves."""
        callers = []
        while (caller := self.come(priority=priority)).attempt is not None:
            callers.append(caller)
        self.admission_queue.remove(caller)
        return callers


def landed(held: Held, caller: QueuedRequest) -> None:
    assert caller.attempt is not None
    held.router.attempts.succeed(caller.attempt)


def test_requests_wait_without_capacity_and_are_placed_as_one_ends() -> None:
    held = Held()
    running = held.fill()
    assert len(running) == 6, "two run on each of two engines, and one is ahead"
    first, second = held.come(), held.come()
    assert (first.attempt, second.attempt, len(held.admission_queue)) == (None, None, 2)
    landed(held, running[0])
    assert first.attempt is not None
    assert (second.attempt, len(held.admission_queue)) == (None, 1)


def test_an_engine_that_reports_a_queue_is_sent_nothing() -> None:
    held = Held(max_running=100)
    for worker in held.workers.all:
        held.report(worker, max_running=100, queued=50)
    caller = held.come()
    assert caller.attempt is None
    held.report(held.workers.all[0], max_running=100, queued=12)
    assert caller.attempt is not None
    assert caller.attempt.worker is held.workers.all[0]


def test_requests_sent_to_an_engine_fit_its_memory() -> None:
    held = Held(max_running=100)
    for worker in held.workers.all:
        held.report(worker, max_running=100, capacity_tokens=1000)
    long = [held.come(held.ask("x" * 2400, system=f"{n}")) for n in range(3)]
    assert [caller.attempt is None for caller in long] == [False, False, True]
    landed(held, long[0])
    assert long[2].attempt is not None


def test_a_long_prompt_is_not_passed_after_a_while_and_is_placed_once_it_fits() -> None:
    held = Held(max_running=100)
    for worker in held.workers.all:
        held.report(worker, max_running=100, capacity_tokens=1000)
    half = [held.come(held.ask("x" * 2000, system=f"{n}")) for n in range(2)]
    long = held.come(held.ask("x" * 3000, system="long", **{"x-sgl-ext-priority": "1"}))
    assert long.attempt is None
    assert held.come(held.ask("short", system="1")).attempt is not None, "it lets others by"
    held.clock.now_s += HOME_WAIT_S
    short = held.come(held.ask("short", system="2"))
    assert short.attempt is None, "for a while"
    important = held.come(held.ask("short", system="3", **{"x-sgl-ext-priority": "2"}))
    assert important.attempt is not None, "and who is more important always"
    landed(held, half[0])
    assert long.attempt is not None
    assert short.attempt is not None


def test_a_prompt_that_fits_no_engine_is_placed() -> None:
    held = Held()
    for worker in held.workers.all:
        held.report(worker, capacity_tokens=1000)
    assert held.come(held.ask("x" * 40_000)).attempt is not None
    assert sum(worker.running.tokens for worker in held.workers.all) == 0


def test_a_request_that_could_preempt_passes_the_queue() -> None:
    held = Held()
    held.fill()
    usual = held.come()
    for worker in held.workers.all:
        held.report(worker, queued=5)
    below, person = held.come(priority=9), held.come(priority=10)
    assert person.attempt is not None
    assert usual.attempt is below.attempt is None


def test_the_threshold_is_the_engines() -> None:
    held = Held(preemption_threshold=3)
    held.fill()
    assert held.come(priority=2).attempt is None
    assert held.come(priority=3).attempt is not None


def test_an_engine_without_reports_is_sent_requests_up_to_the_limit() -> None:
    held = Held(worker_limit=20)
    held.fill()
    waiting = held.come()
    for worker in held.workers.all:
        worker.apply_load({"queued": 9, "capacity_tokens": 100_000}, held.clock.now_s)
    held.admission_queue.sweep()
    assert waiting.attempt is not None
    held.fill()
    assert [worker.in_flight for worker in held.workers.all] == [20, 20]


def test_a_workers_report_is_forgotten_when_it_leaves() -> None:
    held = Held()
    worker = held.workers.all[0]
    held.workers.mark(worker, ready=False)
    assert (worker.capacity, worker.pinned_tokens) == (None, 0)
    assert worker.total_pending_tokens(held.clock.now_s) == 0


def test_requests_that_no_scheduler_runs_do_not_wait() -> None:
    held = Held()
    held.fill()
    waiting = [held.come(priority=1) for _ in range(40)]
    there = [worker.running.requests for worker in held.workers.all]
    assert held.come(NO_ROUTING).attempt is not None
    assert [worker.running.requests for worker in held.workers.all] == there
    assert not any(caller.attempt for caller in waiting)


def test_the_load_of_peers_takes_capacity() -> None:
    held = Held()
    for worker in held.workers.all:
        worker.peer_load = Load(3, 3, 0)
    caller = held.come()
    assert caller.attempt is None
    held.workers.all[1].peer_load = Load(2, 2, 0)
    held.router.capacity_changed()
    assert caller.attempt is not None


def homed(held: Held) -> tuple[Worker, RoutingRequest, list[QueuedRequest]]:
    """A session's next turn, whose worker is full while the other one is not."""
    first = held.come(held.ask("Hello"))
    assert first.attempt is not None
    home = first.attempt.worker
    held.confirm(first.attempt)
    landed(held, first)
    running = held.fill()
    for caller in running:
        assert caller.attempt is not None
        if caller.attempt.worker is not home:
            landed(held, caller)
    there = [c for c in running if c.attempt is not None and c.attempt.worker is home]
    return home, held.ask("Hello", "Hi.", "Go on"), there


def test_a_session_waits_for_its_home_a_while_and_others_pass() -> None:
    held = Held()
    home, turn, there = homed(held)
    waiting, other = held.come(turn), held.come()
    assert waiting.attempt is None
    assert other.attempt is not None
    assert other.attempt.worker is not home
    held.clock.now_s += HOME_WAIT_S - 0.1
    held.admission_queue.sweep()
    assert waiting.attempt is None
    landed(held, there[0])
    assert waiting.attempt is not None
    assert (waiting.attempt.worker, waiting.attempt.placement.reason) == (home, "home")


def test_after_a_while_a_session_goes_to_any_worker_with_capacity() -> None:
    held = Held()
    home, turn, _ = homed(held)
    waiting = held.come(turn)
    held.clock.now_s += HOME_WAIT_S
    held.admission_queue.sweep()
    assert waiting.attempt is not None
    assert waiting.attempt.worker is not home
    assert waiting.attempt.placement.reason == "moved"


def test_a_session_with_little_at_home_does_not_wait_for_it() -> None:
    held = Held()
    first = held.come(held.ask("Hi", system="s"))
    assert first.attempt is not None
    home = first.attempt.worker
    held.confirm(first.attempt, tokens=300)
    held.report(home, queued=9)
    turn = held.come(held.ask("Hi", "Hi.", "Go on", system="s"))
    assert turn.attempt is not None
    assert turn.attempt.worker is not home


def test_a_timeout_and_a_full_queue_reject_with_retry_after() -> None:
    held = Held(limit=2)
    held.fill()
    one, two, three = held.come(), held.come(), held.come(priority=1)
    assert [caller.error is None for caller in (one, two, three)] == [True, False, True]
    held.clock.now_s += 61
    held.admission_queue.sweep()
    for caller in (one, two, three):
        assert caller.error is not None
        assert (caller.error.status, caller.error.retry_after_s) == (503, 5)
    assert len(held.admission_queue) == 0


def test_the_excess_of_a_long_queue_is_rejected_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    original = admission_queue.in_order

    def counted(waiting: list[Any], *args: Any) -> list[int]:
        sizes.append(len(waiting))
        return original(waiting, *args)

    held = Held(limit=640)
    held.fill()
    monkeypatch.setattr(admission_queue, "in_order", counted)
    routing = held.ask("Hello", system="x")
    callers = [held.come(routing) for _ in range(1000)]
    assert len([size for size in sizes if size > 300]) <= 360 / 10
    assert 640 <= len(held.admission_queue) <= 650
    held.admission_queue.sweep()
    assert len(held.admission_queue) == 640
    assert len([caller for caller in callers if caller.error is not None]) == 360


def test_removed_requests_are_not_referenced() -> None:
    held = Held()
    running = held.fill()
    routing = held.ask("Hello", system="x")
    callers = [held.come(routing) for _ in range(90)]
    kept = [weakref.ref(caller) for caller in callers]
    landed(held, running.pop())
    for caller in callers[1:]:
        held.admission_queue.remove(caller)
    first = callers[0]
    assert first.attempt is not None
    held.router.attempts.fail(first.attempt, by_worker=False)
    held.let_in.clear()
    del callers, caller, first
    gc.collect()
    assert not any(one() for one in kept)
    assert len(held.admission_queue) == 0


def test_ten_thousand_wait_and_half_are_removed() -> None:
    held = Held(limit=10_000)
    running = held.fill()
    routing = [held.ask("Hello", system=f"{n}") for n in range(50)]
    callers = [held.come(routing[n % 50]) for n in range(10_200)]
    held.admission_queue.sweep()
    away = [caller for caller in callers if caller.error is not None]
    assert (len(held.admission_queue), len(away)) == (10_000, 200)
    assert {(c.error.status, c.error.retry_after_s) for c in away if c.error} == {(503, 5)}
    for caller in [caller for caller in callers if caller.error is None][::2]:
        held.admission_queue.remove(caller)
    assert len(held.admission_queue) == 5000
    while len(held.admission_queue):
        landed(held, running.pop())
        running.append(held.let_in[-1])
    assert len(held.let_in) == 5000
    kept = [weakref.ref(caller) for caller in callers]
    for caller in running:
        landed(held, caller)
    del callers, caller, running, away
    held.let_in.clear()
    gc.collect()
    assert not any(one() for one in kept)
    assert [worker.running.requests for worker in held.workers.all] == [0, 0]


def test_waiting_times_are_counted_by_band_of_priority() -> None:
    held = Held()
    running = held.fill()
    aged, person = held.come(), held.come(priority=7)
    assert "sgl_ext_queued_requests 2.0" in held.metrics.render().decode()
    held.clock.now_s += 12
    landed(held, running[0])
    landed(held, running[1])
    assert aged.attempt is not None
    assert person.attempt is not None
    page = held.metrics.render().decode()
    assert 'sgl_ext_priority_queue_seconds_sum{priority="0"} 12.0' in page
    assert 'sgl_ext_priority_queue_seconds_count{priority="1"} 1.0' in page
    assert "sgl_ext_promotions_total 2.0" in page
    assert "sgl_ext_queued_requests 0.0" in page


@pytest.mark.parametrize(
    ("priority", "label"),
    [(-1000, "-1"), (-1, "-1"), (0, "0"), (1, "1"), (9, "1"), (10, "10"), (1000, "10")],
)
def test_the_band_of_a_priority_is_its_lowest(priority: int, label: str) -> None:
    assert band(priority) == label
