"""Balancers of one port: they agree on sessions, loads and workers without a common memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.cluster.peers import SILENT_S, PeerGroup, Peers
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempt import Attempt, RoutingRequest
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Load
from sgl_ext.balancer.routing.workers import Workers

A, B = "http://a", "http://b"
SECRET = b"0123456789abcdef"


class Wire:
    """A socket's place: what is sent is taken in by whoever has the address, at once."""

    def __init__(self, number: int, all_of_them: list[Process]) -> None:
        self._number = number
        self._all = all_of_them

    def getsockname(self) -> tuple[str, int]:
        return ("", self._number)

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        if address[1] < len(self._all):
            self._all[address[1]].siblings.receive(data, self.getsockname())


class Process:
    """A balancer's router with its siblings, on a clock of the test's."""

    now_s = 100.0

    def __init__(self, number: int, wires: list[Wire]) -> None:
        self.metrics = Metrics()
        self.workers = Workers([A, B], self.metrics, self.clock)
        for worker in self.workers.all:
            self.workers.mark(worker, ready=True)
            worker.publishes = True
        self.router = Router(self.workers, self.metrics, clock=self.clock)
        group = PeerGroup(number, SECRET, tuple(wires))  # type: ignore[arg-type]
        self.siblings = Peers(group, self.router, self.metrics, self.clock)
        self.siblings.load_changed = self.siblings.send_state  # type: ignore[method-assign]
        self.router.attempts._on_end[:] = [self.siblings.send_state]

    def clock(self) -> float:
        return Process.now_s

    def ask(self, *texts: str) -> RoutingRequest:
        roles = ("user", "assistant")
        turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        return self.router.read("/v1/messages", {}, {"system": "S" * 9000, "messages": turns}, 0)

    def fly(self, *texts: str) -> Attempt:
        attempt = self.router.place(self.ask(*texts), set())
        assert attempt is not None
        return attempt

    def named(self, url: str) -> Any:
        found = self.workers.find(url)
        assert found is not None
        return found


@pytest.fixture
def pair() -> list[Process]:
    Process.now_s = 100.0
    processes: list[Process] = []
    wires = [Wire(number, processes) for number in range(2)]
    processes += [Process(number, wires) for number in range(2)]
    return processes


def test_they_agree_on_a_session(pair: list[Process]) -> None:
    one, two = pair
    for number in range(8):
        first = one.fly(f"Task {number}")
        second = two.fly(f"Task {number}", "Done.", "Go on")
        assert (second.worker.url, second.placement.reason) == (first.worker.url, "home")


def test_they_know_what_the_other_sent(pair: list[Process]) -> None:
    one, two = pair
    attempt = one.fly("Task")
    held = {
        row["name"]: row["held_tokens"] for row in two.router.explain(two.ask("Task"))["workers"]
    }
    assert held[attempt.worker.url] > 2000


def test_they_know_each_other_s_load(pair: list[Process]) -> None:
    one, two = pair
    attempt = one.fly("Task")
    there = two.named(attempt.worker.url)
    assert there.peer_load == Load(1, 0, attempt.uncached_tokens)
    assert there.total_pending_tokens(Process.now_s) == attempt.uncached_tokens > 2000
    one.router.attempts.prefill_done(attempt)
    one.router.attempts.succeed(attempt)
    assert there.peer_load == Load()


def test_what_ends_at_one_is_told_at_once_to_those_who_wait_at_the_other(
    pair: list[Process],
) -> None:
    one, two = pair
    attempt = one.fly("Task")
    opened: list[Load] = []
    there = two.named(attempt.worker.url)
    two.router.on_capacity(lambda: opened.append(there.peer_load))
    one.router.attempts.succeed(attempt)
    assert opened == [Load()]


def test_what_a_dead_process_said_is_forgotten(pair: list[Process]) -> None:
    one, two = pair
    attempt = one.fly("Task")
    Process.now_s += SILENT_S + 1
    two.siblings.send_state()
    assert two.named(attempt.worker.url).peer_load == Load()


def test_a_worker_that_one_is_told_of_joins_all(pair: list[Process]) -> None:
    one, two = pair
    one.workers.add("http://c")
    one.workers.drain(one.named(A))
    one.siblings.send_state()
    assert two.workers.find("http://c") is not None
    assert two.named(A).draining
    two.siblings.send_state()
    assert one.workers.find("http://c") is not None, "an older table takes nothing back"


def test_a_process_that_begins_anew_learns_the_table(pair: list[Process]) -> None:
    one, two = pair
    one.workers.add("http://c")
    two.workers.changed_s = 0.0
    one.siblings.send_state()
    two.siblings.send_state()
    assert two.workers.find("http://c") is not None


@given(st.binary(max_size=80), st.booleans())
def test_no_message_breaks_the_reader(data: bytes, signed: bool) -> None:
    processes: list[Process] = []
    wires = [Wire(number, processes) for number in range(2)]
    process = Process(0, wires)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        process.siblings.receive(SECRET + data if signed else data, ("", 1))
    assert [worker.peer_load for worker in process.workers.all] == [Load(), Load()]
