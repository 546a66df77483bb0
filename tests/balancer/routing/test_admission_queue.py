"""The admission queue: which requests wait, for how long, and when they are placed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from scheduler import order
from sgl_ext.balancer.metrics.registry import band
from sgl_ext.balancer.routing.admission import HOME_WAIT_S, RESERVE_S, AdmissionQueue
from sgl_ext.balancer.routing.routing_request import NO_ROUTING, RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.membership.sources import STATIC
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.wire.peers import Load
from tests.balancer.routing.test_router import Setting

ANN = {"x-tenant-id": "ann"}


class QueuedRequest:
    """A request that records its outcome."""

    def __init__(self, routing: RoutingRequest, placed_requests: list[QueuedRequest]) -> None:
        self.routing = routing
        self._let_in = placed_requests
        self.tried: set[Worker] = set()
        self.attempt: Attempt | None = None
        self.error: BalancerError | None = None

    def placed(self, attempt: Attempt) -> None:
        assert self.attempt is None
        self.attempt = attempt
        self._let_in.append(self)

    def rejected(self, error: BalancerError) -> None:
        self.error = error


class Queue(Setting):
    """An admission queue for workers that report capacity for two requests, and one ahead, each.

    placed_requests: the requests that had to wait, in the order in which they were placed.
    """

    def __init__(self, max_running: int = 2, limit: int = 100, **options: Any) -> None:
        super().__init__(**options)
        self.admission_queue = AdmissionQueue(
            self.router, self.metrics, limit, 60.0, aging_s=10.0, clock=self.clock
        )
        self.placed_requests: list[QueuedRequest] = []
        self._number = 0
        for worker in self.workers.all:
            self.report(worker, max_running=max_running)

    def report(self, worker: Worker, **load: int) -> None:
        """The engine reports its load."""
        report = {"capacity_tokens": 100_000, "max_running": 2, "queued": 0, **load}
        worker.apply_load(report, self.clock.now_s)
        self.router.capacity_changed()

    def arrive(
        self, routing: RoutingRequest | None = None, priority: int = 0, **headers: str
    ) -> QueuedRequest:
        """Adds a request, with a prompt that no other request shares unless `routing` is given."""
        self._number += 1
        if routing is None:
            text = f"{self._number:09}"
            headers["x-sgl-ext-priority"] = str(priority)
            routing = self.read(text, system=text * 10, **headers)
        request = QueuedRequest(routing, self.placed_requests)
        if self.admission_queue.place(request) and request in self.placed_requests:
            self.placed_requests.remove(request)
        return request

    def fill(self, priority: int = 0) -> list[QueuedRequest]:
        """Adds requests until one has to wait, which is removed."""
        requests = []
        while (request := self.arrive(priority=priority)).attempt is not None:
            requests.append(request)
        self.admission_queue.remove(request)
        return requests


def landed(queue: Queue, request: QueuedRequest) -> None:
    assert request.attempt is not None
    queue.router.attempts.succeed(request.attempt)


def test_requests_wait_without_capacity_and_are_placed_as_one_ends() -> None:
    queue = Queue()
    running = queue.fill()
    assert len(running) == 6, "two run on each of two engines, and one is ahead"
    first, second = queue.arrive(), queue.arrive()
    assert (first.attempt, second.attempt, len(queue.admission_queue)) == (None, None, 2)
    landed(queue, running[0])
    assert first.attempt is not None
    assert (second.attempt, len(queue.admission_queue)) == (None, 1)


def test_an_engine_that_reports_a_queue_is_sent_nothing() -> None:
    queue = Queue(max_running=100)
    for worker in queue.workers.all:
        queue.report(worker, max_running=100, queued=50)
    request = queue.arrive()
    assert request.attempt is None
    queue.report(queue.workers.all[0], max_running=100, queued=12)
    assert request.attempt is not None
    assert request.attempt.worker is queue.workers.all[0]


def test_requests_sent_to_an_engine_fit_its_memory() -> None:
    queue = Queue(max_running=100)
    for worker in queue.workers.all:
        queue.report(worker, max_running=100, capacity_tokens=1000)
    long = [queue.arrive(queue.read("x" * 2400, system=f"{n}")) for n in range(3)]
    assert [request.attempt is None for request in long] == [False, False, True]
    landed(queue, long[0])
    assert long[2].attempt is not None


def test_a_long_prompt_is_not_passed_after_a_while_and_is_placed_once_it_fits() -> None:
    queue = Queue(max_running=100)
    for worker in queue.workers.all:
        queue.report(worker, max_running=100, capacity_tokens=1000)
    half = [queue.arrive(queue.read("x" * 2000, system=f"{n}")) for n in range(2)]
    long = queue.arrive(queue.read("x" * 3000, system="long", **{"x-sgl-ext-priority": "1"}))
    assert long.attempt is None
    assert queue.arrive(queue.read("short", system="1")).attempt is not None, "it lets others by"
    queue.clock.now_s += HOME_WAIT_S
    short = queue.arrive(queue.read("short", system="2"))
    assert short.attempt is None, "for a while"
    important = queue.arrive(queue.read("short", system="3", **{"x-sgl-ext-priority": "2"}))
    assert important.attempt is not None, "a more important request always passes"
    landed(queue, half[0])
    assert long.attempt is not None
    assert short.attempt is not None


def test_a_prompt_that_fits_no_engine_is_placed() -> None:
    queue = Queue()
    for worker in queue.workers.all:
        queue.report(worker, capacity_tokens=1000)
    assert queue.arrive(queue.read("x" * 40_000)).attempt is not None
    assert sum(worker.running.tokens for worker in queue.workers.all) == 0


def test_requests_wait_for_workers_that_restart_and_no_longer_than_for_capacity() -> None:
    queue = Queue()
    members = [worker.member for worker in queue.workers.all]
    queue.workers.apply(STATIC, [structs.replace(member, state="restarting") for member in members])
    first, second = queue.arrive(), queue.arrive()
    queue.admission_queue.sweep()
    assert (first.error, second.error, len(queue.admission_queue)) == (None, None, 2)
    queue.admission_queue.remove(second)
    queue.clock.now_s += 60.0
    queue.admission_queue.sweep()
    assert first.error is not None
    assert first.error.message == "All engines are restarting. None had capacity for 60 s."
    third = queue.arrive()
    queue.workers.apply(STATIC, [structs.replace(members[0], id="its successor")])
    queue.workers.mark(queue.workers.all[-1], ready=True)
    queue.admission_queue.sweep()
    assert third.attempt is not None
    assert third.attempt.worker.id == "its successor"
    queue.workers.apply(STATIC, [structs.replace(member, state="restarting") for member in members])
    fourth = queue.arrive()
    queue.workers.apply(STATIC, [])
    queue.admission_queue.sweep()
    assert fourth.error is not None
    assert fourth.error.message == "No engine is ready."


def test_a_request_that_could_preempt_passes_the_queue() -> None:
    queue = Queue()
    queue.fill()
    usual = queue.arrive()
    for worker in queue.workers.all:
        queue.report(worker, queued=5)
    below, person = queue.arrive(priority=9), queue.arrive(priority=10)
    assert person.attempt is not None
    assert usual.attempt is below.attempt is None


def test_the_threshold_is_the_engines() -> None:
    queue = Queue(preemption_threshold=3)
    queue.fill()
    assert queue.arrive(priority=2).attempt is None
    assert queue.arrive(priority=3).attempt is not None


def test_an_engine_without_reports_is_sent_requests_up_to_the_limit() -> None:
    queue = Queue(worker_limit=20)
    queue.fill()
    waiting = queue.arrive()
    for worker in queue.workers.all:
        worker.apply_load({"queued": 9, "capacity_tokens": 100_000}, queue.clock.now_s)
    queue.admission_queue.sweep()
    assert waiting.attempt is not None
    queue.fill()
    assert [worker.in_flight for worker in queue.workers.all] == [20, 20]


def test_a_workers_report_is_forgotten_when_it_leaves() -> None:
    queue = Queue()
    worker = queue.workers.all[0]
    queue.workers.mark(worker, ready=False)
    assert (worker.capacity, worker.pinned_tokens) == (None, 0)
    assert worker.total_pending_tokens(queue.clock.now_s) == 0


def test_requests_that_no_scheduler_runs_do_not_wait() -> None:
    queue = Queue()
    queue.fill()
    waiting = [queue.arrive(priority=1) for _ in range(40)]
    there = [worker.running.requests for worker in queue.workers.all]
    assert queue.arrive(NO_ROUTING).attempt is not None
    assert [worker.running.requests for worker in queue.workers.all] == there
    assert not any(request.attempt for request in waiting)


def test_the_load_of_peers_takes_capacity() -> None:
    queue = Queue()
    for worker in queue.workers.all:
        worker.peer_load = Load(3, 3, 0)
    request = queue.arrive()
    assert request.attempt is None
    queue.workers.all[1].peer_load = Load(2, 2, 0)
    queue.router.capacity_changed()
    assert request.attempt is not None


def homed(queue: Queue) -> tuple[Worker, RoutingRequest, list[QueuedRequest]]:
    """A session's next turn, whose worker is full while the other one is not."""
    first = queue.arrive(queue.read("Hello"))
    assert first.attempt is not None
    home = first.attempt.worker
    queue.confirm(first.attempt)
    landed(queue, first)
    running = queue.fill()
    for request in running:
        assert request.attempt is not None
        if request.attempt.worker is not home:
            landed(queue, request)
    there = [c for c in running if c.attempt is not None and c.attempt.worker is home]
    return home, queue.read("Hello", "Hi.", "Go on"), there


def test_a_session_waits_for_its_home_a_while_and_others_pass() -> None:
    queue = Queue()
    home, turn, there = homed(queue)
    waiting, other = queue.arrive(turn), queue.arrive()
    assert waiting.attempt is None
    assert other.attempt is not None
    assert other.attempt.worker is not home
    queue.clock.now_s += HOME_WAIT_S - 0.1
    queue.admission_queue.sweep()
    assert waiting.attempt is None
    landed(queue, there[0])
    assert waiting.attempt is not None
    assert (waiting.attempt.worker, waiting.attempt.placement.reason) == (home, "home")


def test_a_long_prompt_that_is_cached_costs_less_than_a_short_new_one() -> None:
    queue = Queue(urls=["http://a"])
    said = "Hello " * 1000
    first = queue.arrive(queue.read(said))
    assert first.attempt is not None
    queue.confirm(first.attempt)
    landed(queue, first)
    running = queue.fill()
    new = queue.arrive(queue.read("Bye " * 6000))
    turn = queue.arrive(queue.read(said, "Hi.", "x" * 12_000))
    assert (new.attempt, turn.attempt) == (None, None), "much of the turn has to be computed"
    landed(queue, running[0])
    assert turn.attempt is not None
    assert new.attempt is None


def cached_turn(queue: Queue, said: str = "Hello " * 1000, priority: int = 0) -> RoutingRequest:
    """The second turn of a conversation whose first is in the memory of a worker."""
    first = queue.arrive(queue.read(said))
    assert first.attempt is not None
    queue.confirm(first.attempt)
    landed(queue, first)
    headers = {"x-sgl-ext-priority": str(priority)}
    return queue.read(said, "Hi.", "Go on", **headers)


def test_a_prompt_at_hand_is_sent_beyond_an_engine_s_capacity() -> None:
    queue = Queue(urls=["http://a"])
    turn = cached_turn(queue)
    queue.fill()
    waits, sent = queue.arrive(), queue.arrive(turn)
    assert sent.attempt is not None
    assert sent.attempt.is_beyond
    assert waits.attempt is None


def test_a_prompt_at_hand_does_not_pass_a_more_important_request() -> None:
    queue = Queue(urls=["http://a"])
    turn, same = cached_turn(queue), cached_turn(queue, "Hallo " * 1000, priority=5)
    queue.fill()
    assert queue.arrive(priority=5).attempt is None
    assert queue.arrive(turn).attempt is None
    assert queue.arrive(same).attempt is not None


def test_what_passes_the_queue_counts_for_its_tenant() -> None:
    queue = Queue(urls=["http://a"])
    turn = structs.replace(cached_turn(queue), tenant="ann", output_tokens=500)
    running = queue.fill()
    first = queue.arrive(queue.read("Bye", **ANN))
    second = queue.arrive(queue.read("Bye", **{"x-tenant-id": "ben"}))
    assert queue.arrive(turn).attempt is not None
    landed(queue, running[0])
    assert first.attempt is None, "ben was given less"
    assert second.attempt is not None


def test_what_was_sent_beyond_its_capacity_takes_no_capacity_of_an_engine() -> None:
    queue = Queue(urls=["http://a"])
    turn = cached_turn(queue)
    running = queue.fill()
    waits, sent = queue.arrive(), queue.arrive(turn)
    queue.report(queue.workers.all[0], queued=2)  # the one sent ahead, and the one beyond
    assert waits.attempt is None
    landed(queue, running[0])
    assert waits.attempt is not None
    landed(queue, sent)
    assert queue.workers.all[0].running.beyond == 0


def test_as_many_go_beyond_an_engine_s_capacity_as_it_takes_within_it() -> None:
    queue = Queue(urls=["http://a"])
    turns = [cached_turn(queue, f"{number}: " + "Hello " * 1000) for number in range(6)]
    within = queue.fill()
    sent = [queue.arrive(turn).attempt is not None for turn in turns]
    assert sent == [True] * len(within) + [False] * (len(turns) - len(within))


def test_a_prompt_at_hand_goes_to_an_engine_with_capacity_first() -> None:
    queue = Queue(urls=["http://a", "http://b"])
    turn = cached_turn(queue)
    home = queue.router.attempts.sessions.home(turn.session or 0)
    assert home is not None
    elsewhere = [r for r in queue.fill() if r.attempt and r.attempt.worker.slot != home[0]]
    landed(queue, elsewhere[0])
    waits = queue.arrive(turn)
    assert waits.attempt is None, "it may go to the other one, if its own has no capacity for long"
    queue.clock.now_s += HOME_WAIT_S
    queue.admission_queue.sweep()
    queue.clock.now_s += HOME_WAIT_S
    queue.admission_queue.sweep()
    assert waits.attempt is not None
    assert waits.attempt.worker is elsewhere[0].attempt.worker  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens_per_s", [0, 100_000, 100])
def test_the_more_there_is_to_compute_the_longer_the_cheapest_go_first(tokens_per_s: int) -> None:
    queue = Queue(urls=["http://a"])
    for seconds in (1, 2) if tokens_per_s else ():
        done = {"prefill_tokens": tokens_per_s * seconds, "prefill_ms": 1000 * seconds}
        queue.report(queue.workers.all[0], **done)
    running = queue.fill()
    dear = queue.arrive(queue.read("Hello " * 1000))
    queue.clock.now_s += 15
    cheap = queue.arrive()
    landed(queue, running[0])
    is_slow = tokens_per_s == 100
    assert (dear.attempt is None, cheap.attempt is None) == (is_slow, not is_slow)
    queue.clock.now_s += 30
    landed(queue, running[1])
    assert dear.attempt is not None, "no longer than half of the longest wait"


def test_after_a_while_a_session_goes_to_any_worker_with_capacity() -> None:
    queue = Queue()
    home, turn, _ = homed(queue)
    waiting = queue.arrive(turn)
    queue.clock.now_s += HOME_WAIT_S
    queue.admission_queue.sweep()
    assert waiting.attempt is not None
    assert waiting.attempt.worker is not home
    assert waiting.attempt.placement.reason == "moved"


def test_a_session_with_little_at_home_does_not_wait_for_it() -> None:
    queue = Queue()
    first = queue.arrive(queue.read("Hi", system="s"))
    assert first.attempt is not None
    home = first.attempt.worker
    queue.confirm(first.attempt, tokens=300)
    queue.report(home, queued=9)
    turn = queue.arrive(queue.read("Hi", "Hi.", "Go on", system="s"))
    assert turn.attempt is not None
    assert turn.attempt.worker is not home


def test_a_timeout_and_a_full_queue_reject_with_retry_after() -> None:
    queue = Queue(limit=2)
    queue.fill()
    one, two, three = queue.arrive(), queue.arrive(), queue.arrive(priority=1)
    assert [request.error is None for request in (one, two, three)] == [True, False, True]
    queue.clock.now_s += 61
    queue.admission_queue.sweep()
    for request in (one, two, three):
        assert request.error is not None
        assert (request.error.status, request.error.retry_after_s) == (503, 5)
    assert len(queue.admission_queue) == 0


def test_the_excess_of_a_long_queue_is_rejected_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    original = order.in_order

    def counted(waiting: list[Any], *args: Any) -> list[int]:
        sizes.append(len(waiting))
        return original(waiting, *args)

    queue = Queue(limit=640)
    queue.fill()
    monkeypatch.setattr(order, "in_order", counted)
    routing = queue.read("Hello", system="x")
    requests = [queue.arrive(routing) for _ in range(1000)]
    assert len([size for size in sizes if size > 300]) <= 360 / 10
    assert 640 <= len(queue.admission_queue) <= 650
    queue.admission_queue.sweep()
    assert len(queue.admission_queue) == 640
    assert len([request for request in requests if request.error is not None]) == 360


def test_removed_requests_are_not_referenced() -> None:
    queue = Queue()
    running = queue.fill()
    routing = queue.read("Hello", system="x")
    requests = [queue.arrive(routing) for _ in range(90)]
    kept = [weakref.ref(request) for request in requests]
    landed(queue, running.pop())
    for request in requests[1:]:
        queue.admission_queue.remove(request)
    first = requests[0]
    assert first.attempt is not None
    queue.router.attempts.fail(first.attempt, by_worker=False)
    queue.placed_requests.clear()
    del requests, request, first
    gc.collect()
    assert not any(one() for one in kept)
    assert len(queue.admission_queue) == 0


def test_ten_thousand_wait_and_half_are_removed() -> None:
    queue = Queue(limit=10_000)
    running = queue.fill()
    routing = [queue.read("Hello", system=f"{n}") for n in range(50)]
    requests = [queue.arrive(routing[n % 50]) for n in range(10_200)]
    queue.admission_queue.sweep()
    away = [request for request in requests if request.error is not None]
    assert (len(queue.admission_queue), len(away)) == (10_000, 200)
    assert {(c.error.status, c.error.retry_after_s) for c in away if c.error} == {(503, 5)}
    for request in [request for request in requests if request.error is None][::2]:
        queue.admission_queue.remove(request)
    assert len(queue.admission_queue) == 5000
    while len(queue.admission_queue):
        landed(queue, running.pop())
        running.append(queue.placed_requests[-1])
    assert len(queue.placed_requests) == 5000
    kept = [weakref.ref(request) for request in requests]
    for request in running:
        landed(queue, request)
    del requests, request, running, away
    queue.placed_requests.clear()
    gc.collect()
    assert not any(one() for one in kept)
    assert [worker.running.requests for worker in queue.workers.all] == [0, 0]


def test_waiting_times_are_counted_by_band_of_priority() -> None:
    queue = Queue()
    running = queue.fill()
    aged, person = queue.arrive(), queue.arrive(priority=7)
    page = queue.metrics.render().decode()
    assert "sgl_ext_queued_requests 2.0" in page
    for priority, count in (("-1", 0), ("0", 1), ("1", 1), ("10", 0)):
        assert f'sgl_ext_queued_by_priority{{priority="{priority}"}} {count}.0' in page
    assert 'sgl_ext_table_size{table="admission_queue",unit="entries"} 2.0' in page
    queue.clock.now_s += 12
    landed(queue, running[0])
    landed(queue, running[1])
    assert aged.attempt is not None
    assert person.attempt is not None
    page = queue.metrics.render().decode()
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


def test_a_tenant_that_claims_all_memory_locks_no_other_out() -> None:
    """Its requests run for long and more of them wait; a small one of another tenant is placed."""
    queue = Queue(max_running=100)
    for worker in queue.workers.all:
        queue.report(worker, max_running=100, capacity_tokens=1000, context_tokens=1000)

    def claim(number: int) -> QueuedRequest:
        return queue.arrive(replace(queue.read(f"{number}", system=f"{number}", **ANN), **claimed))

    claimed = {"output_tokens": 262_000}
    claims = [claim(number) for number in range(100)]
    assert [request.attempt is not None for request in claims[:4]] == [True, True, False, False]
    for _ in range(100):
        queue.clock.now_s += RESERVE_S / 50
        queue.admission_queue.sweep()
    assert all(request.attempt is None for request in claims[2:])
    small = queue.arrive(queue.read("x" * 900, system="small", **{"x-tenant-id": "ben"}))
    queue.admission_queue.sweep()
    assert small.attempt is not None


def test_what_a_tenant_has_in_flight_itself_holds_up_no_other_tenant() -> None:
    queue = Queue(max_running=100, urls=["http://a"])
    queue.report(queue.workers.all[0], max_running=100, capacity_tokens=1000)
    claims = [queue.arrive(queue.read("x" * 1200, system=f"{n}", **ANN)) for n in range(4)]
    assert claims[3].attempt is None, "they fill the memory"
    for _ in range(2):
        queue.clock.now_s += HOME_WAIT_S
        queue.admission_queue.sweep()
    small = queue.arrive(queue.read("x" * 1200, system="ben", **{"x-tenant-id": "ben"}))
    assert small.attempt is not None
    landed(queue, claims[0])
    landed(queue, claims[1])
    assert claims[3].attempt is not None


def test_a_request_beyond_its_tenant_s_part_may_hold_others_up_for_a_while() -> None:
    queue = Queue(max_running=100)
    for worker in queue.workers.all:
        queue.report(worker, max_running=100, capacity_tokens=1000)
    for number in range(2):
        queue.arrive(queue.read("x" * 2000, system=f"{number}", **ANN))
    large = queue.arrive(queue.read("x" * 2900, system="large", **{"x-tenant-id": "ben"}))
    queue.clock.now_s += HOME_WAIT_S
    queue.admission_queue.sweep()
    queue.clock.now_s += HOME_WAIT_S
    small = queue.arrive(queue.read("small", system="small", **ANN))
    assert (large.attempt, small.attempt) == (None, None)
    queue.clock.now_s += RESERVE_S
    queue.admission_queue.sweep()
    assert small.attempt is not None
