"""The router: requests follow what workers hold and will hold, and are accounted for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempt import Attempt, RoutingRequest
from sgl_ext.balancer.routing.attempts import UNCONFIRMED_S
from sgl_ext.balancer.routing.prefixes import CONFIRM_S
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import SETTLED_S, SLOW_START_S
from sgl_ext.balancer.routing.workers import Workers

A, B = "http://a", "http://b"
HARNESS = "You are an agent. " * 2000


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Setting:
    """A router over two ready workers that publish what they hold."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.workers = Workers([A, B], self.metrics, self.clock)
        for worker in self.workers.all:
            self.workers.mark(worker, ready=True)
            worker.publishes = True
        self.router = Router(self.workers, self.metrics, clock=self.clock, **options)

    def read(self, *texts: str, system: str = HARNESS, **headers: str) -> RoutingRequest:
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        body = {"system": system, "messages": messages}
        return self.router.read("/v1/messages", headers, body, 0)

    def place(self, routing: RoutingRequest) -> Attempt:
        attempt = self.router.place(routing, set())
        assert attempt is not None
        return attempt

    def held_tokens(self, attempt: Attempt) -> int:
        """What the attempt's worker is thought to hold of its prompt."""
        views = self.router.explain(attempt.routing)["workers"]
        return int(views[attempt.worker.slot]["held_tokens"])

    def confirm(self, attempt: Attempt, tokens: int = 10_000) -> None:
        """The engine reports that it holds the whole chain."""
        parent = None
        for segment in attempt.routing.chain.hashes:
            assert self.router.prefixes.index.store(attempt.worker.slot, parent, segment, tokens)
            parent = segment


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_the_next_turn_goes_where_the_conversation_is(setting: Setting) -> None:
    first = setting.place(setting.read("Hello"))
    setting.router.attempts.prefill_done(first)
    setting.confirm(first)
    setting.router.attempts.succeed(first)
    second = setting.place(setting.read("Hello", "Hi.", "Go on"))
    assert second.worker is first.worker
    assert second.placement.reason == "home"
    assert second.predicted_tokens == 10_000


def test_another_balancer_finds_the_session_by_what_the_workers_hold(setting: Setting) -> None:
    first = setting.place(setting.read("Hello"))
    other = Setting()
    home = other.workers.find(first.worker.url)
    assert home is not None
    parent = None
    for segment in first.routing.chain.hashes:
        other.router.prefixes.index.store(home.slot, parent, segment, 9_000)
        parent = segment
    second = other.place(other.read("Hello", "Hi.", "Go on"))
    assert (second.worker.url, second.placement.reason) == (first.worker.url, "home")


def test_sub_agents_follow_the_one_whose_prefill_runs(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    second, third = setting.place(setting.read("Find b")), setting.place(setting.read("Find c"))
    assert second.worker is third.worker is lead.worker
    assert second.follows is third.follows is lead
    resumed: list[str] = []
    lead.followers.append(lambda: resumed.append("second"))
    setting.router.attempts.prefill_done(lead)
    assert resumed == ["second"]
    assert setting.place(setting.read("Find d")).follows is None


def test_followers_go_on_when_the_engine_reports_the_prefix(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    setting.place(setting.read("Find b"))
    resumed: list[str] = []
    lead.followers.append(lambda: resumed.append("follower"))
    setting.router.attempts.confirm(lead.worker)
    assert resumed == []
    setting.confirm(lead)
    setting.router.attempts.confirm(lead.worker)
    assert (resumed, lead.worker.decoding) == (["follower"], 1)
    setting.router.attempts.prefill_done(lead)
    assert lead.worker.decoding == 1


def test_no_request_waits_for_a_prefix_on_an_engine_without_events(setting: Setting) -> None:
    for worker in setting.workers.all:
        worker.publishes = False
    setting.place(setting.read("Find a"))
    assert setting.place(setting.read("Find b")).follows is None


def test_followers_are_woken_when_the_leader_fails(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    setting.place(setting.read("Find b"))
    resumed: list[str] = []
    lead.followers.append(lambda: resumed.append("follower"))
    setting.router.attempts.fail(lead, by_worker=True)
    assert resumed == ["follower"]


def test_new_sessions_of_one_harness_spread_as_they_add_up(setting: Setting) -> None:
    used = set()
    for number in range(48):
        attempt = setting.place(setting.read(f"Task {number}"))
        setting.router.attempts.prefill_done(attempt)
        setting.confirm(attempt)
        used.add(attempt.worker.url)
    assert used == {A, B}


def test_an_unconfirmed_prefix_is_forgotten_soon(setting: Setting) -> None:
    attempt = setting.place(setting.read("Hello"))
    setting.router.attempts.prefill_done(attempt)
    setting.router.attempts.succeed(attempt)
    assert setting.held_tokens(attempt) > 0
    setting.clock.now_s += CONFIRM_S
    setting.place(setting.read("Else", system="Other"))
    assert setting.held_tokens(attempt) == 0


def test_an_engine_without_events_is_believed_longer(setting: Setting) -> None:
    attempt = setting.place(setting.read("Hello"))
    attempt.worker.publishes = False
    setting.router.attempts.succeed(attempt)
    setting.clock.now_s += UNCONFIRMED_S - 1
    setting.place(setting.read("Else", system="Other"))
    assert setting.held_tokens(attempt) > 0


def test_load_is_released_however_an_attempt_ends(setting: Setting) -> None:
    attempts = [setting.place(setting.read(f"Task {n}", system=f"{n}" * 9000)) for n in range(4)]
    assert sum(worker.pending_tokens for worker in setting.workers.all) > 8000
    setting.router.attempts.prefill_done(attempts[0])
    assert attempts[0].worker.decoding == 1
    setting.router.attempts.succeed(attempts[0])
    setting.router.attempts.fail(attempts[1], by_worker=True)
    setting.router.attempts.fail(attempts[2], by_worker=False)
    setting.router.attempts.prefill_done(attempts[3])
    setting.router.attempts.fail(attempts[3], by_worker=True)
    loads = [(w.in_flight, w.pending_tokens, w.decoding) for w in setting.workers.all]
    assert loads == [(0, 0, 0)] * 2


def test_a_dead_worker_is_not_picked_again_by_affinity(setting: Setting) -> None:
    first = setting.place(setting.read("Hello"))
    setting.confirm(first)
    setting.router.attempts.succeed(first)
    setting.workers.mark(first.worker, ready=False)
    second = setting.place(setting.read("Hello", "Hi.", "Go on"))
    assert second.worker is not first.worker
    setting.workers.mark(first.worker, ready=True)
    assert setting.held_tokens(first) == 0


def test_a_worker_that_failed_its_trial_gets_no_requests_until_one_succeeds(
    setting: Setting,
) -> None:
    def where() -> set[str]:
        tasks = [setting.read(f"Task {n}", system=f"{n}" * 9) for n in range(8)]
        return {setting.place(task).worker.url for task in tasks}

    bad = setting.workers.all[0]
    for _ in range(5):
        bad.breaker.failed(setting.clock.now_s, answered=True)
    assert bad.url in where()
    bad.breaker.trial_failed(setting.clock.now_s)
    assert where() == {B}
    bad.breaker.succeeded()
    assert bad.url in where()


def test_a_draining_worker_gets_nothing_new(setting: Setting) -> None:
    attempt = setting.place(setting.read("Hello"))
    attempt.worker.draining = True
    assert setting.place(setting.read("Hello", "Hi.", "Go on")).worker is not attempt.worker


def test_a_returning_worker_takes_up_work_slowly(setting: Setting) -> None:
    back, other = setting.workers.all
    setting.workers.mark(back, ready=False)
    setting.workers.mark(back, ready=True)
    first = setting.place(setting.read("One", system="1" * 4000))
    assert first.worker is other
    setting.clock.now_s += SLOW_START_S
    second = setting.place(setting.read("Two", system="2" * 4000))
    assert second.worker is back


def test_no_attempt_begins_when_all_workers_are_full() -> None:
    setting = Setting(worker_limit=1)
    setting.place(setting.read("a"))
    setting.place(setting.read("b"))
    assert setting.router.place(setting.read("c"), set()) is None
    assert setting.router.any_available()


def test_a_retry_goes_elsewhere_if_it_can(setting: Setting) -> None:
    routing = setting.read("Hello")
    first = setting.place(routing)
    setting.router.attempts.fail(first, by_worker=True)
    second = setting.router.place(routing, {first.worker})
    assert second is not None
    assert second.worker is not first.worker
    again = setting.router.place(routing, {first.worker, second.worker})
    assert again is not None


def test_an_engines_own_account_adds_the_work_of_others(setting: Setting) -> None:
    worker = setting.workers.all[0]
    worker.apply_load({"pending_tokens": 5000}, now_s=10.0)
    assert worker.total_pending_tokens(10.0) == 0, "it may be older than what has finished since"
    assert worker.total_pending_tokens(10.0 + SETTLED_S) == 5000
    worker.apply_load({"pending_tokens": 4000}, now_s=11.0)
    assert worker.total_pending_tokens(11.0) == 4000
    worker.apply_load({"pinned_tokens": 90_000, "used_tokens": 90_000}, now_s=12.0)
    assert worker.total_pending_tokens(13.0) == 0, "pinned tokens are no load"


def test_a_computed_prompt_is_no_longer_pending(setting: Setting) -> None:
    attempt = setting.place(setting.read("Write a book", system="9" * 40_000))
    worker, now_s = attempt.worker, setting.clock.now_s
    assert worker.total_pending_tokens(now_s) > 9_000
    worker.apply_load({"pending_tokens": 0}, now_s)
    assert worker.total_pending_tokens(now_s) > 9_000
    assert worker.total_pending_tokens(now_s + SETTLED_S) == 0, "no answer yet, but it decodes"


def test_session_headers_separate_equal_conversations(setting: Setting) -> None:
    one = setting.read("Hello", **{"x-claude-code-session-id": "1"})
    two = setting.read("Hello", **{"x-claude-code-session-id": "2"})
    assert one.session != two.session
    assert one.chain == two.chain


def test_tools_in_any_order_are_one_prefix_with_sort_tools() -> None:
    tools = [{"name": "b"}, {"name": "a"}]
    turn = [{"role": "user", "content": "Hello"}]
    for sort_tools in (False, True):
        router = Setting(sort_tools=sort_tools).router
        one, two = (
            router.read("/v1/messages", {}, {"tools": t, "messages": turn}, 0).chain
            for t in (tools, tools[::-1])
        )
        assert (one == two) is sort_tools


def test_slots_are_used_again(setting: Setting) -> None:
    gone = setting.workers.all[0]
    setting.workers.drain(gone)
    setting.workers.remove_drained()
    joined = setting.workers.add("http://c")
    assert joined.slot == gone.slot
    assert setting.workers.add("http://c") is joined


def test_prefill_ahead_goes_home_and_is_no_load(setting: Setting) -> None:
    first = setting.place(setting.read("Hello"))
    setting.router.attempts.prefill_done(first)
    setting.confirm(first)
    setting.router.attempts.succeed(first)
    expected = len(setting.router.prefixes.in_flight)
    ahead = replace(setting.read("Hello", "Hi.", "Go on"), runs=False, warms=True)
    warming = setting.place(ahead)
    assert warming.worker is first.worker
    assert (warming.worker.pending_tokens, warming.worker.running.requests) == (0, 0)
    assert len(setting.router.prefixes.in_flight) == expected
    turn = setting.place(setting.read("Hello", "Hi.", "Go on"))
    assert turn.worker is first.worker
    assert turn.follows is None, "it would wait for what runs when nothing else does"
    setting.router.attempts.succeed(turn)
    setting.router.attempts.succeed(warming)
    assert first.worker.pending_tokens == first.worker.in_flight == 0
