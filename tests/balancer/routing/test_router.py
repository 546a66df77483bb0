"""The router: requests follow what workers hold and will hold, and are accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import generate_latest

from scheduler.speeds import EVEN
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.router import Router, explain
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.reading.segments import Chain
from sgl_ext.wire.headers import TENANT_HEADER
from tests.balancer.workers import routed, workers_at

A, B = "http://a", "http://b"
HARNESS = "You are an agent. " * 2000


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Setting:
    """A router over two ready workers that publish what they hold."""

    def __init__(self, urls: Sequence[str] = (A, B), **options: Any) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.workers = workers_at(urls, self.metrics, self.clock)
        for worker in self.workers.all:
            self.workers.mark(worker, ready=True)
            worker.publishes = True
        self.router = Router(self.workers, self.metrics, clock=self.clock, **options)

    def read(self, *texts: str, system: str = HARNESS, **headers: str) -> RoutingRequest:
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        body = {"system": system, "messages": messages}
        return routed(self.router, "/v1/messages", headers, body)

    def place(self, routing: RoutingRequest) -> Attempt:
        attempt = self.router.place(routing, set())
        assert attempt is not None
        return attempt

    def held_tokens(self, attempt: Attempt) -> int:
        """What the attempt's worker is thought to hold of its prompt."""
        views = explain(self.router, attempt.routing)["workers"]
        return int(views[attempt.worker.slot]["held_tokens"])

    def store(self, worker: Worker, chain: Chain) -> None:
        """The engine reports that it holds a chain, of four bytes a token."""
        parent = None
        for segment, end in zip(chain.hashes, chain.ends, strict=True):
            assert self.router.prefixes.index.store(worker.slot, parent, segment, end // 4)
            parent = segment

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


def test_balancers_find_the_same_home_of_a_session_that_two_workers_hold() -> None:
    """The slots of the workers differ, as each balancer has its own list of them."""
    settings = [Setting(), Setting((B, A))]
    homes = set()
    for number in range(20):
        found = []
        for setting in settings:
            routing = setting.read("Hello", system=f"{number} {HARNESS}")
            for worker in setting.workers.all:
                parent = None
                for segment in routing.chain.hashes:
                    setting.router.prefixes.index.store(worker.slot, parent, segment, 9_000)
                    parent = segment
            found.append(explain(setting.router, routing)["home"])
        assert found[0] == found[1]
        homes.add(found[0])
    assert homes == {A, B}


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


def test_new_sessions_of_one_harness_spread_as_they_add_up(setting: Setting) -> None:
    used = set()
    for number in range(48):
        attempt = setting.place(setting.read(f"Task {number}"))
        setting.router.attempts.prefill_done(attempt)
        setting.confirm(attempt)
        used.add(attempt.worker.url)
    assert used == {A, B}


def test_a_list_of_prompts_keeps_no_other_tenant_in_the_queue() -> None:
    setting = Setting([A])
    (worker,) = setting.workers.all
    read = partial(routed, setting.router)
    ann, ben = ({TENANT_HEADER: name} for name in ("ann", "ben"))
    many = read("/v1/completions", ann, {"prompt": [f"prompt {n}" for n in range(64)]}, 900)
    assert many.prompts == 64
    listed = setting.place(many)
    load = {"capacity_tokens": 10_000, "max_running": 16, "queued": 48}
    worker.apply_load(load, setting.clock())
    small = {"prompt": "Hi"}
    assert setting.router.place(read("/v1/completions", ann, small, 20), set()) is None
    assert setting.router.place(read("/v1/completions", ben, small, 20), set()) is not None
    setting.router.attempts.succeed(listed)
    assert setting.router.place(read("/v1/completions", ben, small, 20), set()) is None


PIECE = "A line of a prompt that others share. "


@given(
    shared=st.integers(0, 400),
    tails=st.lists(st.integers(1, 400), min_size=2, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_a_batch_stays_where_its_prompts_are_however_often_it_comes(
    shared: int, tails: list[int]
) -> None:
    setting, homes = Setting(), set[str]()
    for _ in range(12):
        prompts = [PIECE * shared + f"Prompt {n}. " * tail for n, tail in enumerate(tails)]
        body = {"model": "m", "prompt": prompts}
        routing = routed(setting.router, "/v1/completions", {}, body, len("".join(prompts)))
        assert routing.prompts == len(tails)
        attempt = setting.place(routing)
        homes.add(attempt.worker.url)
        setting.router.attempts.prefill_done(attempt)
        for chain in (routing.chain, *routing.others):
            setting.store(attempt.worker, chain)
        setting.router.attempts.succeed(attempt)
        setting.clock.now_s += 0.5
    assert len(homes) == 1


def test_what_the_prompts_of_a_batch_share_counts_once_and_what_is_held_of_each_counts(
    setting: Setting,
) -> None:
    prompts = [PIECE * 200 + f"{n} " * 2_000 for n in range(4)]
    body = {"model": "m", "prompt": prompts}
    routing = routed(setting.router, "/v1/completions", {}, body, len("".join(prompts)))
    shared, tail = len(PIECE) * 200, 4_000
    assert routing.prompt_tokens == pytest.approx((shared + 4 * tail) / 4, rel=0.6)
    attempt = setting.place(routing)
    assert attempt.uncached_tokens == routing.prompt_tokens
    for chain in (routing.chain, *routing.others):
        setting.store(attempt.worker, chain)
    setting.router.attempts.succeed(attempt)
    again = setting.place(routing)
    assert again.worker is attempt.worker
    assert again.uncached_tokens < 0.05 * routing.prompt_tokens


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


def test_session_headers_separate_equal_conversations(setting: Setting) -> None:
    one = setting.read("Hello", **{"x-claude-code-session-id": "1"})
    two = setting.read("Hello", **{"x-claude-code-session-id": "2"})
    assert one.session != two.session
    assert one.chain == two.chain


def test_a_session_keeps_its_worker_when_its_system_text_changes(setting: Setting) -> None:
    stated = {"x-claude-code-session-id": "s"}
    first = setting.place(setting.read("Hello", **stated))
    later = setting.read("Hello", "Hi.", "Go on", system=f"It is 12:01. {HARNESS}", **stated)
    assert explain(setting.router, later)["home"] == first.worker.id
    helper = setting.read("Find the bug.", **stated)
    assert explain(setting.router, helper)["home"] is None
    assert len({each.session_name for each in (first.routing, later, helper)}) == 1
    other = setting.read("Hello", **stated, **{"x-tenant-id": "other"})
    assert other.session != first.routing.session


def test_tools_in_any_order_are_one_prefix_with_sort_tools() -> None:
    tools = [{"name": "b"}, {"name": "a"}]
    turn = [{"role": "user", "content": "Hello"}]
    for sort_tools in (False, True):
        router = Setting().router
        one, two = (
            routed(
                router, "/v1/messages", {}, {"tools": t, "messages": turn}, sort_tools=sort_tools
            ).chain
            for t in (tools, tools[::-1])
        )
        assert (one == two) is sort_tools


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


def test_no_request_waits_for_a_home_that_hangs_or_goes_there(setting: Setting) -> None:
    first = setting.place(setting.read("Hello"))
    setting.router.attempts.prefill_done(first)
    setting.confirm(first)
    setting.router.attempts.succeed(first)
    home = first.worker
    home.is_hung = True
    home.ready = True  # a probe from before may end after the one that found the hang
    second = setting.router.place(setting.read("Hello", "Hi.", "Go on"), set(), waits_for_home=True)
    assert second is not None
    assert second.worker is not home


def on_host(setting: Setting, worker: Worker, routing: RoutingRequest, tokens: int) -> None:
    """The worker's host has the whole chain."""
    setting.workers.set_tiers(worker, has_host=True, machine="")
    assert worker.host_slot is not None
    index, parent = setting.router.prefixes.written, None
    assert index is not None
    for segment in routing.chain.hashes:
        assert index.store(worker.host_slot, parent, segment, tokens)
        parent = segment


def test_a_request_goes_where_its_prefix_is_on_the_host(setting: Setting) -> None:
    routing = setting.read("Hello")
    for worker in setting.workers.all:
        setting.router.prefixes.forget_worker(worker.slot)
        on_host(setting, worker, routing, routing.prompt_tokens)
        attempt = setting.place(setting.read("Hello"))
        assert attempt.worker is worker
        assert attempt.predicted_tokens == routing.prompt_tokens
        assert attempt.uncached_tokens == int(worker.load_share * routing.prompt_tokens)
        setting.router.attempts.succeed(attempt)
        setting.workers.mark(worker, ready=False)
        setting.workers.mark(worker, ready=True)


def test_explain_shows_the_tiers(setting: Setting) -> None:
    routing = setting.read("Hello")
    first = setting.workers.all[0]
    on_host(setting, first, routing, routing.prompt_tokens)
    first.load_share = 0.25
    rows = explain(setting.router, routing)["workers"]
    assert [row["host_tokens"] for row in rows] == [routing.prompt_tokens, 0]
    assert rows[0]["loaded"] == 0.25 * routing.prompt_tokens
    assert [row["uncached"] for row in rows] == [0, routing.prompt_tokens]


def test_a_conversation_stays_with_the_worker_whose_host_has_it(setting: Setting) -> None:
    first = setting.place(setting.read("Hello"))
    setting.router.attempts.succeed(first)
    setting.router.prefixes.forget_worker(first.worker.slot)
    on_host(setting, first.worker, first.routing, first.routing.prompt_tokens)
    second = setting.place(setting.read("Hello", "Hi.", "Go on"))
    assert (second.worker, second.placement.reason) == (first.worker, "home")


def test_what_a_machine_shares_counts_for_all_of_its_workers() -> None:
    setting = Setting((A, B, "http://c"))
    a, b, c = setting.workers.all
    for worker in (a, b):
        setting.workers.set_tiers(worker, has_host=False, machine="one")
    assert a.shared_slot == b.shared_slot is not None
    routing, index, parent = setting.read("Hello"), setting.router.prefixes.written, None
    assert index is not None
    for segment in routing.chain.hashes:
        assert index.store(a.shared_slot, parent, segment, 6_000)
        parent = segment
    rows = explain(setting.router, routing)["workers"]
    assert [row["shared_tokens"] for row in rows] == [6_000, 6_000, 0]
    setting.workers.mark(a, ready=False)
    assert explain(setting.router, routing)["workers"][1]["shared_tokens"] == 6_000
    setting.workers.mark(b, ready=False)
    assert len(index) == 0, "no worker of the machine is ready"
    assert c.shared_slot is None


def test_a_worker_that_leaves_gives_the_slots_of_its_tiers_back(setting: Setting) -> None:
    a, b = setting.workers.all
    for worker in (a, b):
        setting.workers.set_tiers(worker, has_host=True, machine="one")
    setting.workers.apply(a.source, [b.member])
    setting.workers.remove_drained()
    assert setting.workers.has_tiers
    setting.workers.apply(a.source, [])
    setting.workers.remove_drained()
    assert not setting.workers.has_tiers
    again = setting.workers.add("http://d", 3.0)
    assert again is not None
    assert again.slot == 0
    setting.workers.set_tiers(again, has_host=True, machine="two")
    assert {again.host_slot, again.shared_slot} == {1, 2}


def serve(setting: Setting, slow: Worker, *, count: int = 60) -> None:
    """New conversations of all lengths, each at its own time; one worker takes four times as long
    as the others."""
    for number in range(count):
        for worker in setting.workers.all:
            others = {each for each in setting.workers.all if each is not worker}
            text = f"{number} {worker.id} " * (50 + 37 * number % 400)
            attempt = setting.router.place(setting.read(text, system=text), others)
            assert attempt is not None
            assert attempt.worker is worker
            factor = 4 if worker is slow else 1
            setting.clock.now_s += factor * (0.01 + attempt.work_tokens / 20_000)
            setting.router.attempts.prefill_done(attempt)
            output_tokens = 20 + 7 * number % 300
            setting.clock.now_s += factor * output_tokens / 100
            setting.router.attempts.succeed(attempt, output_tokens)


def test_new_conversations_go_to_faster_workers_once_requests_have_shown_them() -> None:
    setting = Setting([f"http://w{number}" for number in range(4)])
    slow = setting.workers.all[2]
    serve(setting, slow)
    setting.clock.now_s += 100  # sessions there, and what it computed, are forgotten
    chosen = {setting.place(setting.read(f"New {n}", system=f"{n}")).worker for n in range(40)}
    assert chosen == {*setting.workers.all} - {slow}
    rows = {row["name"]: row for row in explain(setting.router, setting.read("New"))["workers"]}
    assert rows[slow.id]["prefill_weight"] > 2
    assert rows[slow.id]["decode_weight"] > 2
    page = generate_latest(setting.metrics.registry).decode()
    weight = rows[slow.id]["prefill_weight"]
    assert f'sgl_ext_worker_prefill_weight{{worker="{slow.id}"}} {weight}' in page
    assert f'sgl_ext_worker_decode_weight{{worker="{setting.workers.all[0].id}"}} 1.0' in page


def test_without_learning_a_slow_worker_is_as_good_as_any() -> None:
    setting = Setting([f"http://w{number}" for number in range(4)])
    slow = setting.workers.all[2]
    serve(setting, slow)
    assert slow.weights.prefill > 2
    setting.router.attempts.speeds.learns = False
    setting.clock.now_s += 100
    chosen = {setting.place(setting.read(f"New {n}", system=f"{n}")).worker for n in range(40)}
    assert chosen == {*setting.workers.all}
    assert slow.weights == EVEN


def test_a_worker_that_failed_is_taken_for_a_usual_one() -> None:
    setting = Setting([f"http://w{number}" for number in range(3)])
    slow = setting.workers.all[2]
    serve(setting, slow)
    assert slow.weights != EVEN
    setting.router.workers.mark(slow, ready=False)
    setting.router.workers.mark(slow, ready=True)
    assert slow.weights == EVEN
    attempt = setting.router.place(setting.read("It warms up."), {*setting.workers.all[:2]})
    assert attempt is not None
    assert attempt.work_tokens == 0, "a slow start shows no speed"
