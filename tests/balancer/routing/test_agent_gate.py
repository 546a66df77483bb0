"""Agents' requests that are held back while they do not fit into a worker's memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.working_set import GROWTH
from sgl_ext.balancer.routing.admission import MOST_COMPARED, AdmissionQueue, AgentGate
from tests.balancer.routing.test_admission_queue import Queue, QueuedRequest, landed
from tests.balancer.routing.test_router import A, Setting

HOLD_S, TIMEOUT_S = 20, 60.0
POOL = 10_000
AGENT = 3000
"""Tokens of an agent: two that come back fit, and a third does not."""
assert 2 * GROWTH * AGENT < POOL < 2 * GROWTH * AGENT + AGENT


class Held(Queue):
    """One worker that prefills all the time, and an admission queue that holds agents back."""

    def __init__(self, hold_s: float = HOLD_S, **options: Any) -> None:
        super().__init__(max_running=100, urls=(A,), **options)
        self.router.on_capacity.clear()
        self.admission_queue = AdmissionQueue(
            self.router, self.metrics, 100, TIMEOUT_S, 10.0, hold_s, self.clock
        )
        self._load = {"capacity_tokens": POOL, "pending_tokens": 5000, "max_running": 100}
        self._prefill_s = 0
        self.pass_s(40)

    def pass_s(self, seconds: int, **load: int) -> None:
        """Time passes, in which the worker reports its load, and that it prefills."""
        self._load |= load
        for _ in range(seconds):
            self.clock.now_s += 1
            self._prefill_s += 1
            totals = {"prefill_ms": 1000 * self._prefill_s, "prefill_tokens": 300 * self._prefill_s}
            self.report(self.workers.all[0], **totals, **self._load)
            self.admission_queue.sweep()

    def program(
        self,
        name: str,
        *,
        turn: int = 1,
        tenant: str = "ann",
        tokens: int = AGENT,
        **headers: str,
    ) -> QueuedRequest:
        """A turn of an agent that shares nothing with others."""
        texts = [name, *(f"turn {n}" for n in range(2 * (turn - 1)))]
        about = {"x-tenant-id": tenant, "x-sgl-ext-session-id": name} | headers
        return self.arrive(self.read(*texts, system=f"{name} " + "x" * 4 * tokens, **about))

    def agent(self, name: str, *, tenant: str = "ann", **headers: str) -> QueuedRequest:
        """The third turn of an agent that comes back a second after each answer."""
        for turn in (1, 2):
            landed(self, self.program(name, turn=turn, tenant=tenant))
            self.pass_s(1)
        return self.program(name, turn=3, tenant=tenant, **headers)

    def evict(self) -> None:
        self.router.prefixes.forget_worker(self.workers.all[0].slot)


def is_held(request: QueuedRequest) -> bool:
    assert request.error is None
    return request.attempt is None


def full(**options: Any) -> tuple[Held, QueuedRequest, QueuedRequest]:
    """A worker whose memory two agents need, and their requests."""
    queue = Held(**options)
    return queue, queue.agent("one"), queue.agent("two")


def test_an_agent_is_held_back_until_another_one_is_not_expected_any_more() -> None:
    queue, first, _ = full()
    third = queue.program("three")
    assert is_held(third)
    landed(queue, first)
    assert is_held(third), "it is expected back"
    queue.pass_s(HOLD_S - 1)
    assert not is_held(third)


def test_the_metrics_say_how_many_agents_there_are_and_how_many_more_fit() -> None:
    queue = Held()
    gate = queue.admission_queue._gate
    last = queue.agent("one", **{"x-sgl-ext-session-final": "1"})
    room = gate.there() + gate.fit()
    assert gate.there() == 1
    queue.agent("two")
    assert (gate.there(), gate.fit()) == (2, room - 2)
    landed(queue, last)
    assert (gate.there(), gate.fit()) == (1, room - 1)
    queue.workers.all[0].ready = False
    assert (gate.there(), gate.fit()) == (1, 0)


def test_an_agent_goes_on_while_its_prompt_is_in_memory() -> None:
    queue, first, _ = full()
    new = queue.program("three")
    landed(queue, first)
    assert not is_held(queue.program("one", turn=4))
    assert is_held(new)


def test_the_end_of_an_agent_makes_room_at_once() -> None:
    queue = Held()
    queue.agent("one")
    last = queue.agent("two", **{"x-sgl-ext-session-final": "1"})
    third = queue.program("three")
    assert is_held(third)
    landed(queue, last)
    assert not is_held(third)


def test_what_is_held_back_counts_as_work_that_waits() -> None:
    """It decides for how long the cheapest go first."""
    windows_s = []
    for holds in (False, True):
        queue, *_ = full()
        if holds:
            assert is_held(queue.program("three"))
        short = queue.arrive()
        queue.pass_s(1, queued=100)
        waits = queue.arrive()
        queue.pass_s(1)
        assert not is_held(short)
        assert is_held(waits)
        windows_s.append(queue.admission_queue.window_s)
        queue.pass_s(HOLD_S, queued=0)
        assert not is_held(waits)
        assert queue.admission_queue.window_s == 10.0, "nothing waits any more"
    assert windows_s == [10.0, TIMEOUT_S / 2]


def test_held_requests_are_sent_in_the_order_of_all_requests() -> None:
    queue, urgent = Held(), {"x-sgl-ext-priority": "5"}
    running = [queue.agent(name, **urgent) for name in ("one", "two")]
    early, late = queue.program("early"), queue.program("later")
    short = queue.program("short", tokens=AGENT - 100)
    important = queue.program("important", **urgent)
    sent = [important, short, early, late]
    assert all(map(is_held, sent))
    for number in range(len(sent)):
        for request in running:
            landed(queue, request)  # the worker is idle
        running = [sent[number]]
        assert [is_held(request) for request in sent] == [
            each > number for each in range(len(sent))
        ]


def test_an_agent_does_not_wait_for_less_important_ones() -> None:
    queue, *_ = full()
    assert not is_held(queue.program("urgent", **{"x-sgl-ext-priority": "5"}))


def test_an_idle_engine_is_sent_what_waits() -> None:
    queue, first, second = full()
    third = queue.program("three")
    landed(queue, first)
    assert is_held(third)
    landed(queue, second)
    assert not is_held(third)


def test_an_engine_that_seldom_prefills_is_sent_everything() -> None:
    queue, *_ = full()
    queue.clock.now_s += 60
    queue.report(queue.workers.all[0], capacity_tokens=POOL, max_running=100, pending_tokens=0)
    queue.clock.now_s += 1
    assert queue.workers.all[0].pace.share(queue.clock.now_s) < 0.1
    for attempt in queue.workers.all[0].attempts:
        queue.router.attempts.prefill_done(attempt)
    assert not is_held(queue.program("three"))


@pytest.mark.parametrize("load", [{"capacity_tokens": 0}, {"host_capacity_tokens": 3 * POOL}])
def test_without_a_report_or_with_room_in_host_memory_nothing_is_held_back(
    load: dict[str, int],
) -> None:
    queue, *_ = full()
    queue.pass_s(1, **load)
    assert not is_held(queue.program("three"))


def test_off_nothing_is_held_back_or_counted() -> None:
    queue, *_ = full(hold_s=0.0)
    assert not is_held(queue.program("three"))
    assert queue.router.attempts.working_set is None


def test_prompts_of_conversations_that_do_not_come_back_are_not_held_back() -> None:
    """They are in memory while they are computed, and worth nothing after that."""
    queue = Held()
    for number in range(20):
        request = queue.program(f"{number}")
        assert not is_held(request)
        if number > 1:
            landed(queue, request)


def test_the_setting_changes_while_requests_are_held_back() -> None:
    queue, *_ = full()
    third = queue.program("three")
    assert is_held(third)
    queue.admission_queue.change(100, TIMEOUT_S, 10.0, 0.0)
    queue.admission_queue.sweep()
    assert not is_held(third)


def test_a_client_that_disconnects_leaves_the_queue() -> None:
    queue, *_ = full()
    third = queue.program("three")
    assert len(queue.admission_queue) == 1
    queue.admission_queue.remove(third)
    assert len(queue.admission_queue) == 0
    queue.pass_s(HOLD_S)
    assert third.attempt is None


def test_too_many_are_not_held_back() -> None:
    queue, *_ = full()
    queue.admission_queue.change(1, TIMEOUT_S, 10.0, HOLD_S)
    assert [is_held(queue.program(f"{n}")) for n in range(2)] == [True, False]


def test_of_a_large_fleet_some_workers_are_compared_at_a_time() -> None:
    setting = Setting([f"http://{n}" for n in range(3 * MOST_COMPARED)])
    gate = AgentGate(setting.router, HOLD_S)
    routing = setting.read("hello")
    found = [{*gate._workers(routing)} for _ in range(3)]
    assert [len(each) for each in found] == [MOST_COMPARED] * 3
    assert len(set.union(*found)) == 3 * MOST_COMPARED


HOSTILE = st.fixed_dictionaries(
    {},
    optional={
        "x-sgl-ext-session-final": st.sampled_from(["1", "0"]),
        "x-sgl-ext-priority": st.sampled_from(["-1000", "0", "1000"]),
        "x-sgl-ext-session-id": st.sampled_from(["one", "same", "mine"]),
        "x-claude-code-agent-id": st.sampled_from(["a", "b"]),
    },
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(HOSTILE, st.integers(0, 2), st.integers(0, 3)), max_size=12))
def test_whatever_another_tenant_claims_a_tenant_has_its_part(steps: list[Any]) -> None:
    """Eve's requests are many, long, and have every header. Ann's agent fits her half."""
    queue = Held()
    ann = queue.agent("ann's")
    for number, (headers, ends, passed_s) in enumerate(steps):
        queue.program(f"eve {number % 5}", turn=1 + number // 5, tenant="eve", **headers)
        queue.pass_s(passed_s)
        eves = [one for one in queue.workers.all[0].attempts if one.routing.tenant == "eve"]
        for attempt in eves[:ends]:
            queue.router.attempts.succeed(attempt)
        queue.evict()
        landed(queue, ann)
        ann = queue.program("ann's", turn=4 + number)
        assert not is_held(ann)


@settings(max_examples=30, deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=8))
def test_no_header_lets_a_tenant_take_more_than_others_leave(claims: list[Any]) -> None:
    """Bob computes two agents' requests, more than his half. Eve gets her first, and no more."""
    queue = Held()
    queue.agent("bob's", tenant="bob"), queue.agent("bob's other", tenant="bob")
    sent = [
        not is_held(queue.program(f"eve {number}", tenant="eve", **headers))
        for number, headers in enumerate(claims)
    ]
    assert sent[0]
    assert not any(sent[1:])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "end", "evict"]), st.integers(0, 9), st.integers(0, 15)
        ),
        max_size=40,
    )
)
def test_nobody_is_held_back_for_longer_than_the_bound(steps: list[Any]) -> None:
    queue, *_ = full()
    waiting: dict[QueuedRequest, float] = {}
    turns = dict.fromkeys(range(10), 0)
    for step, number, passed_s in steps:
        if step == "arrive":
            turns[number] += 1
            about = {"x-sgl-ext-priority": f"{number}"}
            request = queue.program(f"{number}", turn=turns[number], **about)
            waiting[request] = queue.clock.now_s
        elif step == "evict":
            queue.evict()
        elif attempts := sorted(
            queue.workers.all[0].attempts, key=lambda one: one.routing.prompt_tokens
        ):
            queue.router.attempts.succeed(attempts[number % len(attempts)])
        queue.pass_s(passed_s)
        for request, since_s in waiting.items():
            is_waiting = request in queue.admission_queue._held
            assert not is_waiting or queue.clock.now_s - since_s < HOLD_S + 1
        working_set = queue.router.attempts.working_set
        assert working_set is not None
        working_set.check()
