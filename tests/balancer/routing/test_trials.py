"""Requests that may have ended an engine wait, and are sent again alone, by a made-up clock."""

from __future__ import annotations

import pytest

from scheduler.suspects import ENDED_S, LAST_WAIT_S, REFUSED_S, SETTLE_S
from sgl_ext.balancer.routing.admission import Trials, fingerprint_of
from sgl_ext.balancer.routing.routing_request import NO_ROUTING, RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.routing.test_router import Setting

URLS = ("http://a", "http://b", "http://c")
TIMEOUT_S = 240.0


class Asked:
    """A request, and what became of it."""

    def __init__(self, fleet: Fleet, text: str) -> None:
        self.fleet = fleet
        self.routing = fleet.read(text)
        self.fingerprint = fingerprint_of("tenant", self.routing, b"")
        self.waits_since_s: float | None = None
        self.attempt: Attempt | None = None
        self.released: list[bool] = []
        self.error: BalancerError | None = None

    def release(self, *, on_trial: bool) -> None:
        self.released.append(on_trial)

    def refuse(self, error: BalancerError) -> None:
        self.error = error

    def rejected(self, error: BalancerError) -> None:
        self.error = error

    def send(self) -> Attempt:
        self.attempt = self.fleet.place(self.routing)
        self.attempt.sent_s = self.fleet.clock.now_s
        return self.attempt

    def lose(self) -> None:
        """Its connection breaks."""
        attempt = self.attempt
        assert attempt is not None
        assert attempt.sent_s is not None
        self.fleet.trials.lost(self, attempt.worker, attempt.sent_s)
        self.fleet.router.attempts.fail(attempt, by_worker=True)


class Fleet(Setting):
    def __init__(self, *urls: str) -> None:
        super().__init__(urls or URLS)
        self.trials = Trials(self.router, lambda: TIMEOUT_S)
        self.trials.sweep()

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.trials.sweep()

    def ends(self, attempt: Attempt) -> None:
        self.workers.mark(attempt.worker, ready=False)

    def suspect(self, text: str = "poison") -> Asked:
        """A request whose engine ended with it, and which waits."""
        asked = Asked(self, text)
        attempt = asked.send()
        self.clock.now_s += 0.3
        asked.lose()
        self.ends(attempt)
        assert not self.trials.admits(asked)
        return asked

    def on_trial(self, asked: Asked) -> Attempt:
        """The trial of a request that was released begins."""
        attempt = asked.send()
        assert self.trials.may_send(asked, attempt)
        self.trials.sent(asked, attempt)
        return attempt

    def counted(self, result: str) -> float:
        return self.metrics.suspect_requests.counts[result,]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_suspect_waits_a_moment_and_is_released_for_its_trial(fleet: Fleet) -> None:
    asked = fleet.suspect()
    fleet.later(SETTLE_S / 2)
    assert asked.released == []
    fleet.later(SETTLE_S / 2)
    assert asked.released == [True]
    assert fleet.counted("suspected") == 1


def test_who_was_there_longer_is_sent_again_at_once(fleet: Fleet) -> None:
    asked = Asked(fleet, "innocent")
    attempt = asked.send()
    fleet.clock.now_s += 5
    attempt.worker.heard(fleet.clock.now_s)
    asked.lose()
    fleet.ends(attempt)
    assert fleet.trials.admits(asked)


def test_a_request_that_ends_a_second_engine_is_refused_with_all_that_are_the_same(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    asked, again = fleet.suspect(), Asked(fleet, "poison")
    assert not fleet.trials.admits(again), "its client sends it again"
    fleet.later(SETTLE_S)
    attempt = fleet.on_trial(asked)
    asked.lose()
    assert fleet.trials.refuses(asked)
    fleet.ends(attempt)
    fleet.later(0.1)
    assert again.error is not None
    assert again.error.status == 400
    assert again.error.message.startswith("Two engines ended while they ran this request")
    assert again.released == []
    assert (fleet.counted("convicted"), fleet.counted("refused")) == (1, 1)
    assert "a request ended two engines; its prompt is refused for 300 s" in caplog.text
    assert fleet.trials.admits(Asked(fleet, "something else"))
    fleet.later(REFUSED_S)
    assert fleet.trials.admits(Asked(fleet, "poison"))


def test_the_next_trial_begins_when_the_one_before_it_is_over(fleet: Fleet) -> None:
    asked = fleet.suspect("one"), Asked(fleet, "two")
    (dead,) = [worker for worker in fleet.workers.all if not worker.ready]
    fleet.trials.lost(asked[1], dead, fleet.clock.now_s - 0.1)
    assert not fleet.trials.admits(asked[1])
    fleet.later(SETTLE_S)
    assert [each.released for each in asked] == [[True], []]
    attempt = fleet.on_trial(asked[0])
    fleet.later(0.5)
    assert asked[1].released == []
    fleet.trials.answered(asked[0])
    fleet.router.attempts.succeed(attempt)
    assert asked[1].released == [True], "an answer is enough"


def test_the_last_engine_is_not_tried_before_another_one_is_back() -> None:
    fleet = Fleet("http://a", "http://b")
    asked = fleet.suspect()
    fleet.later(ENDED_S)
    assert asked.released == []
    (dead,) = [worker for worker in fleet.workers.all if not worker.ready]
    fleet.workers.mark(dead, ready=True)
    fleet.later(0)
    assert asked.released == [True]


def test_the_last_engine_is_tried_if_no_other_comes_back() -> None:
    fleet = Fleet("http://a", "http://b")
    asked = fleet.suspect()
    fleet.later(LAST_WAIT_S - 1)
    assert asked.released == []
    fleet.later(1)
    assert asked.released == [True]


def test_the_only_engine_is_tried_as_soon_as_it_is_back() -> None:
    fleet = Fleet("http://a")
    asked = Asked(fleet, "poison")
    attempt = asked.send()
    asked.lose()
    fleet.ends(attempt)
    fleet.workers.mark(attempt.worker, ready=True)
    again = Asked(fleet, "poison")
    assert not fleet.trials.admits(again), "its client sends it again"
    fleet.later(SETTLE_S)
    assert again.released == [True]


def test_an_engine_that_answers_probes_did_not_end() -> None:
    fleet = Fleet("http://a", "http://b")
    asked = Asked(fleet, "poison")
    worker = asked.send().worker
    asked.lose()
    assert not fleet.trials.admits(asked)
    fleet.later(SETTLE_S)
    assert asked.released == []
    for action in fleet.workers.on_found:
        action(worker, fleet.clock.now_s)
    assert asked.released == [True]


def test_an_engine_may_end_while_a_suspect_waits_for_capacity() -> None:
    fleet = Fleet()
    asked = fleet.suspect()
    fleet.later(SETTLE_S)
    assert asked.released == [True]
    first, second = (worker for worker in fleet.workers.all if worker.ready)
    fleet.workers.mark(first, ready=False)
    attempt = asked.send()
    assert not fleet.trials.may_send(asked, attempt)
    fleet.router.attempts.fail(attempt, by_worker=False)
    fleet.workers.mark(first, ready=True)
    fleet.later(ENDED_S)
    assert asked.released == [True, True]
    assert second.is_available


def test_a_suspect_that_no_engine_can_try_gets_an_error() -> None:
    fleet = Fleet("http://a", "http://b")
    asked = fleet.suspect()
    for worker in fleet.workers.all:
        fleet.workers.mark(worker, ready=False)
    fleet.later(1)
    assert asked.error is not None
    assert asked.error.status == 503


def test_a_client_that_leaves_ends_its_wait(fleet: Fleet) -> None:
    asked = fleet.suspect()
    fleet.trials.remove(asked)
    fleet.later(SETTLE_S)
    assert asked.released == []


def test_an_engine_that_was_stopped_from_outside_blames_nobody(fleet: Fleet) -> None:
    asked = Asked(fleet, "innocent")
    attempt = asked.send()
    attempt.worker.is_hung, attempt.worker.hung_s = True, None
    fleet.ends(attempt)
    asked.lose()
    assert fleet.trials.admits(asked)


def test_a_frozen_engine_blames_what_came_before_it_froze_though_its_client_left(
    fleet: Fleet,
) -> None:
    asked = Asked(fleet, "froze it")
    attempt = asked.send()
    fleet.clock.now_s += 5
    assert attempt.sent_s is not None
    fleet.trials.left(asked, attempt.worker, attempt.sent_s)
    fleet.router.attempts.fail(attempt, by_worker=False)
    fleet.clock.now_s += 60
    attempt.worker.is_hung, attempt.worker.hung_s = True, fleet.clock.now_s
    fleet.ends(attempt)
    assert not fleet.trials.admits(Asked(fleet, "froze it"))
    assert fleet.trials.admits(Asked(fleet, "another"))


def test_a_fingerprint_is_of_the_tenant_and_the_prompt(fleet: Fleet) -> None:
    routing = fleet.read("Hello")
    name = fingerprint_of("a", routing, b"one body")
    assert name == fingerprint_of("a", routing, b"another body")
    assert name != fingerprint_of("b", routing, b"one body")
    assert name != fingerprint_of("a", fleet.read("Hi"), b"one body")
    unread: RoutingRequest = NO_ROUTING
    assert fingerprint_of("a", unread, b"one") != fingerprint_of("a", unread, b"two")
    assert fingerprint_of("a", unread, b"") == ""
