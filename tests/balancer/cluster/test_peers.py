"""Peers: they agree on sessions, loads and workers without shared memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.suspects import REFUSED
from sgl_ext.balancer.cluster.peers import (
    MOST_QUEUED,
    MOST_READ,
    SILENT_S,
    PeerGroup,
    Peers,
    StoreMessages,
)
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.router import explain
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.wire.peers import Load
from tests.balancer.shared_memory import SharedMemory
from tests.balancer.wire import until
from tests.balancer.workers import models_of, routed, workers_at
from tests.waiting import HANG_S

A, B = "http://a", "http://b"
SECRET = b"0123456789abcdef"


class Wire:
    """In place of a socket: a sent message reaches the process with the address at once."""

    def __init__(self, number: int, all_of_them: list[Process]) -> None:
        self._number = number
        self._all = all_of_them

    def getsockname(self) -> tuple[str, int]:
        return ("", self._number)

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        if address[1] < len(self._all):
            self._all[address[1]].peers.receive(data, self.getsockname())


class Process:
    """A balancer's router with its siblings, on a clock of the test's."""

    now_s = 100.0

    def __init__(self, number: int, wires: list[Wire]) -> None:
        self.metrics = Metrics()
        self.workers = workers_at([A, B], self.metrics, self.clock)
        for worker in self.workers.all:
            self.workers.mark(worker, ready=True)
            worker.publishes = True
        self.models = models_of(self.workers, self.metrics, self.clock)
        self.router = self.models.default.router
        group = PeerGroup(number, SECRET, tuple(wires))  # type: ignore[arg-type]
        self.peers = Peers(group, self.models, self.metrics, self.clock)
        self.peers.load_changed = self.peers.send_state  # type: ignore[method-assign]
        self.router.attempts.on_end[:] = [self.peers.send_state]

    def clock(self) -> float:
        return Process.now_s

    def read(self, *texts: str) -> RoutingRequest:
        roles = ("user", "assistant")
        turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        return routed(self.router, "/v1/messages", {}, {"system": "S" * 9000, "messages": turns})

    def place(self, *texts: str) -> Attempt:
        attempt = self.router.place(self.read(*texts), set())
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


def test_peers_agree_on_a_session(pair: list[Process]) -> None:
    one, two = pair
    for number in range(8):
        first = one.place(f"Task {number}")
        second = two.place(f"Task {number}", "Done.", "Go on")
        assert (second.worker.url, second.placement.reason) == (first.worker.url, "home")


def test_peers_expect_each_others_prefixes(pair: list[Process]) -> None:
    one, two = pair
    attempt = one.place("Task")
    held = {
        row["name"]: row["held_tokens"] for row in explain(two.router, two.read("Task"))["workers"]
    }
    assert held[attempt.worker.url] > 2000


def test_peers_know_each_others_load(pair: list[Process]) -> None:
    one, two = pair
    attempt = one.place("Task")
    there = two.named(attempt.worker.url)
    assert there.peer_load == Load(1, 0, attempt.uncached_tokens)
    assert there.total_pending_tokens(Process.now_s) == attempt.uncached_tokens > 2000
    one.router.attempts.prefill_done(attempt)
    one.router.attempts.succeed(attempt)
    assert there.peer_load == Load()


def test_a_message_reads_the_loads_of_those_workers_alone_that_it_changes(
    pair: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet may be large, and messages come a hundred times a second from each peer."""
    one, two = pair
    first = one.place("Task")
    summed: list[str] = []

    def noted(worker: Any, now_s: float) -> None:
        summed.append(worker.id)

    monkeypatch.setattr(two.router.fleet, "load_changed", noted)
    one.peers.send_state()
    assert summed == []
    second = one.place("Another one " * 2_000)
    assert {*summed} == {second.worker.id}
    one.router.attempts.fail(first, by_worker=False)
    assert first.worker.id in summed


def test_the_end_of_a_request_frees_capacity_at_its_peers_at_once(
    pair: list[Process],
) -> None:
    one, two = pair
    attempt = one.place("Task")
    opened: list[Load] = []
    there = two.named(attempt.worker.url)
    two.router.on_capacity.append(lambda: opened.append(there.peer_load))
    one.router.attempts.succeed(attempt)
    assert opened == [Load()]


def test_the_state_of_a_dead_process_is_forgotten(pair: list[Process]) -> None:
    one, two = pair
    attempt = one.place("Task")
    Process.now_s += SILENT_S + 1
    two.peers.send_state()
    assert two.named(attempt.worker.url).peer_load == Load()


def test_a_worker_that_joins_one_peer_joins_all(pair: list[Process]) -> None:
    one, two = pair
    one.workers.add("http://c", 5.0)
    one.workers.remove(one.named(A), 6.0)
    one.peers.send_state()
    assert {w.id for w in two.workers.all if not w.draining} == {B, "http://c"}
    assert two.named(A).state == "drained"
    two.peers.send_state()
    assert one.workers.find("http://c") is not None, "older changes take nothing back"


def test_a_restarted_process_learns_the_admin_apis_changes(pair: list[Process]) -> None:
    one, two = pair
    one.workers.add("http://c", 5.0)
    two.peers.send_state()
    one.peers.send_state()
    assert two.workers.find("http://c") is not None


@given(st.binary(max_size=80), st.booleans())
def test_no_message_breaks_a_peer(data: bytes, signed: bool) -> None:
    processes: list[Process] = []
    wires = [Wire(number, processes) for number in range(2)]
    process = Process(0, wires)
    with pytest.raises(ValueError):  # noqa: PT011 - any malformed message
        process.peers.receive(SECRET + data if signed else data, ("", 1))
    assert [worker.peer_load for worker in process.workers.all] == [Load(), Load()]


async def test_balancers_that_share_a_store_agree_as_processes_of_one_do() -> None:
    Process.now_s = 100.0
    state = SharedMemory(lambda: Process.now_s)
    nodes = [Process(0, []) for _ in range(2)]
    for node in nodes:
        node.peers.group = None
        node.peers.store = StoreMessages(state, node.metrics)
    one, two = nodes
    for node in nodes:
        node.peers.start()
    try:
        await until(lambda: len(state._queues) == 2)
        first = one.place("Task")
        there = two.named(first.worker.id)
        await until(lambda: there.peer_load == Load(1, 0, first.uncached_tokens))
        second = two.place("Task", "Done.", "Go on")
        assert (second.worker.id, second.placement.reason) == (first.worker.id, "home")
        assert one.named(first.worker.id).peer_load == Load(), "its own messages do not count"
        Process.now_s += SILENT_S + 1
        two.peers.send_state()
        assert there.peer_load == Load(), "a balancer that is gone is forgotten"
    finally:
        for node in nodes:
            node.peers.stop()


async def test_while_the_store_fails_messages_are_dropped_and_counted() -> None:
    metrics, state = Metrics(), SharedMemory(lambda: 0.0)
    messages = StoreMessages(state, metrics)
    for number in range(MOST_QUEUED + 5):
        messages.send(b"%d" % number, is_state=False)
        messages.send(b"state %d" % number, is_state=True)
    assert metrics.peer_message_faults.counts[("not sent",)] == 5
    state.is_away = True
    await messages.send_queued()
    assert metrics.peer_message_faults.counts[("not sent",)] == 5 + MOST_QUEUED + 1


async def test_processes_of_one_node_ignore_what_the_store_repeats() -> None:
    state = SharedMemory(lambda: 0.0)
    pair = [StoreMessages(state, Metrics(), SECRET, number) for number in range(2)]
    other = StoreMessages(state, Metrics())
    received: list[tuple[bytes, bytes]] = []
    pair[0].start(lambda data, sender: received.append((data, sender)))
    try:
        await until(lambda: state._queues)
        pair[1].send(b"known", is_state=False)
        await pair[1].send_queued()
        other.send(b"news", is_state=False)
        await other.send_queued()
        await until(lambda: received)
        assert [data for data, _ in received] == [b"news"]
    finally:
        pair[0].stop()


def test_peers_refuse_a_request_that_ended_two_engines_at_one_of_them(
    pair: list[Process],
) -> None:
    one, two = pair
    suspects, now_s = one.router.suspects, Process.now_s
    suspects.lost("poison", A, now_s, now_s, now_s)
    suspects.begin("poison")
    suspects.sent("poison", B, now_s)
    suspects.ended(B, now_s, now_s)
    one.peers.send_state()
    assert two.router.suspects.standing("poison", now_s) is REFUSED


@pytest.fixture
def flooded() -> Iterator[tuple[Peers, socket.socket, Metrics]]:
    """A process of a group with real sockets, and a socket of somebody else."""
    with (
        socket.socket(type=socket.SOCK_DGRAM) as mine,
        socket.socket(type=socket.SOCK_DGRAM) as they,
    ):
        mine.bind(("127.0.0.1", 0))
        metrics = Metrics()
        models = models_of(workers_at([A, B], metrics), metrics)
        yield Peers(PeerGroup(0, SECRET, (mine,)), models, metrics), they, metrics


async def test_a_flood_of_datagrams_leaves_the_loop_its_turns(
    flooded: tuple[Peers, socket.socket, Metrics],
) -> None:
    peers, they, metrics = flooded
    sent = 3 * MOST_READ - 1
    for _ in range(sent):
        they.sendto(b"x", peers.group.mine.getsockname())  # type: ignore[union-attr]
    peers.start()
    faults = metrics.peer_message_faults.counts
    read = [0]
    async with asyncio.timeout(HANG_S):
        while read[-1] < sent:
            await asyncio.sleep(0)
            read.append(int(faults["unreadable",]))
    peers.stop()
    assert max(after - before for before, after in pairwise(read)) == MOST_READ


async def test_datagrams_for_which_there_is_no_room_are_counted(
    flooded: tuple[Peers, socket.socket, Metrics],
) -> None:
    peers, they, metrics = flooded
    mine = peers.group.mine  # type: ignore[union-attr]
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # the least that there is
    peers.start()
    faults = metrics.peer_message_faults.counts
    for number in (1, 2):
        for _ in range(300):
            they.sendto(b"x", mine.getsockname())
        seen = faults["unreadable",]
        await until(lambda: faults["unreadable",] > seen)  # noqa: B023 - it is awaited here
        # The kernel says with the next message how many found no room before it.
        they.sendto(b"x", mine.getsockname())
        await until(lambda: sum(faults.values()) == 301 * number)  # noqa: B023
    peers.stop()
    assert faults["no room",] > 300
