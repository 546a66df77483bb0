"""A request that its client sends again goes on where its first copy was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from sgl_ext import keys
from sgl_ext.balancer.relay import exchange, resends
from sgl_ext.balancer.relay.resends import MOST_LEFT, MOST_LEFT_ELSEWHERE, Resends, socket_path
from sgl_ext.balancer.server import Balancer
from tests.balancer.conftest import Connect, Serve
from tests.balancer.wire import (
    Raw,
    Wire,
    answer,
    chunked,
    process_groups,
    request,
    sse,
    until,
)

SESSION = b"x-claude-code-session-id: s"
ONE, TWO, THREE = (b'data: {"n": %d}\n\n' % n for n in (1, 2, 3))
OPEN = sse(end=b"")


RESEND_S = 5.0  # by the clock of the test


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Copy:
    can_be_taken = True

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_a_copy_waits_for_its_client_and_then_stops() -> None:
    clock = Clock()
    left = Resends(str, 5.0, clock)
    taken, late, lost = (Copy() for _ in range(3))
    for key, copy in zip((b"taken", b"late", b"lost"), (taken, late, lost), strict=True):
        left.leave(key, copy)
    clock.now_s = 4.0
    assert left.take(b"taken") is taken
    assert left.take(b"taken") is None
    lost.can_be_taken = False
    assert left.take(b"lost") is None
    left.sweep()
    assert (late.stops, lost.stops) == (0, 1)
    clock.now_s = 5.0
    left.sweep()
    assert (taken.stops, late.stops, len(left)) == (0, 1, 0)


def test_one_copy_of_a_key_waits_and_no_more_than_the_bound() -> None:
    left = Resends(str, 5.0, Clock())
    copies = [Copy() for _ in range(MOST_LEFT + 1)]
    for number, copy in enumerate(copies):
        left.leave(b"%d" % number, copy)
    assert (len(left), copies[0].stops, copies[1].stops) == (MOST_LEFT, 1, 0)
    again = Copy()
    left.leave(b"1", again)
    left.forget(b"1", copies[1])  # it ended as it was stopped
    assert (copies[1].stops, len(left)) == (1, MOST_LEFT)
    left.close()
    assert (again.stops, len(left)) == (1, 0)


def asked(text: str = "Hello", *lines: bytes, path: bytes = b"/v1/messages", **more: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **more}
    return request(orjson.dumps(body), SESSION, *lines, path=path)


class Node:
    """A balancer whose left requests wait by a clock of the test."""

    def __init__(self, balancer: Balancer, connect: Connect) -> None:
        self.balancer = balancer
        self.left = balancer.services.resends
        self.left.clock = self.clock = Clock()
        self._connect = connect

    async def send(self, data: bytes) -> Wire:
        wire = await self._connect(self.balancer)
        wire.writer.write(data)
        return wire

    async def leaves(self, wire: Wire) -> None:
        """Its client goes away, and its request waits for another one."""
        before = len(self.left)
        wire.writer.transport.abort()
        await until(lambda: len(self.left) == before + 1)

    async def gone(self, wire: Wire) -> None:
        """Its client goes away, and its request with it."""
        count = self.balancer.services.metrics.client_disconnects
        before = count.counts[()]
        wire.writer.transport.abort()
        await until(lambda: count.counts[()] == before + 1)
        assert len(self.left) == 0

    def is_level(self) -> bool:
        return (
            self.balancer.account.used == 0 and not self.balancer.services.workers.all[0].in_flight
        )


async def event_of(wire: Wire) -> bytes:
    size = int(await wire.reader.readuntil(b"\r\n"), 16)
    return (await wire.reader.readexactly(size + 2))[:-2]


async def head_of(wire: Wire) -> bytes:
    return await wire.reader.readuntil(b"\r\n\r\n")


async def test_a_request_that_waits_for_its_prefill_goes_on(serve: Serve, connect: Connect) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked("Hello", b"x-request-id: one"))
    await until(lambda: worker.requests)
    await node.leaves(first)
    node.clock.now_s = 4.9
    node.left.sweep()
    second = await node.send(asked("Hello", b"x-request-id: two"))
    await until(lambda: not len(node.left))
    worker.go_on(b"".join(sse(ONE, TWO)))
    head, events = await second.stream()
    assert events == ONE + TWO
    assert b": two\r\n" in head
    assert b": one\r\n" not in head
    assert len(worker.requests) == 1
    assert node.balancer.services.metrics.resent_requests.counts[()] == 1
    await until(node.is_level)
    # The connection takes the next request, which is a new one.
    assert (await second.ask(asked(stream=False)))[1] == b"{}"


async def test_the_new_client_gets_what_the_first_one_was_sent(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([*OPEN, *chunked(ONE, end=b"")])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await head_of(first)
    assert await event_of(first) == ONE
    await node.leaves(first)
    worker.go_on(chunked(TWO, end=b"")[0])
    second = await node.send(asked("Hello", b"x-request-id: two"))
    head = await head_of(second)
    assert b": two\r\n" in head
    got = await event_of(second)
    while got != ONE + TWO:
        got += await event_of(second)
    await node.leaves(second)
    third = await node.send(asked())
    await head_of(third)
    assert await event_of(third) == ONE + TWO
    worker.go_on(b"".join(chunked(THREE)))
    assert await event_of(third) == THREE
    assert await third.reader.readexactly(5) == b"0\r\n\r\n"
    assert len(worker.requests) == 1
    await until(node.is_level)


async def test_an_answer_that_ended_meanwhile_is_sent_whole(serve: Serve, connect: Connect) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await until(lambda: worker.requests)
    await node.leaves(first)
    worker.go_on(b"".join(sse(ONE, TWO)))
    await until(lambda: not node.balancer.services.workers.all[0].in_flight)
    _, events = await (await node.send(asked())).stream()
    assert events == ONE + TWO
    assert len(worker.requests) == 1
    await until(node.is_level)


async def test_a_request_in_the_queue_keeps_its_place(serve: Serve, connect: Connect) -> None:
    worker = Raw([], [], [])
    node = Node(await serve(worker, max_in_flight=1, resend_s=RESEND_S), connect)
    queue = node.balancer.services.models.default.queue
    await node.send(asked("runs"))
    await until(lambda: worker.requests)
    first = await node.send(asked("first"))
    await until(lambda: len(queue) == 1)
    await node.send(asked("second"))
    await until(lambda: len(queue) == 2)
    await node.leaves(first)
    assert len(queue) == 2
    again = await node.send(asked("first"))
    await until(lambda: not len(node.left))
    worker.go_on(b"".join(sse(ONE)))
    await until(lambda: len(worker.requests) == 2)
    assert b"first" in worker.requests[1]
    worker.go_on(b"".join(sse(TWO)))
    assert (await again.stream())[1] == TWO
    await until(lambda: len(worker.requests) == 3)
    assert b"second" in worker.requests[2]


async def test_a_request_that_nobody_sends_again_stops(serve: Serve, connect: Connect) -> None:
    worker = Raw([*OPEN, *chunked(ONE, end=b"")])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await head_of(first)
    await node.leaves(first)
    node.clock.now_s = 5.0
    node.left.sweep()
    await worker.closed.wait()
    await until(node.is_level)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Hello.", []),
        ("Hello", [b"x-tenant-id: other"]),
        ("Hello", [b"x-claude-code-agent-id: a"]),
        ("Hello", [b"anthropic-beta: more"]),
    ],
)
async def test_another_request_begins_anew(
    serve: Serve, connect: Connect, text: str, lines: list[bytes]
) -> None:
    worker = Raw([], [])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await until(lambda: worker.requests)
    await node.leaves(first)
    await node.send(asked(text, *lines))
    await until(lambda: len(worker.requests) == 2)
    assert len(node.left) == 1


@pytest.mark.parametrize("fault", ["is_stalled", "is_hung"])
async def test_a_copy_at_an_engine_that_stands_still_is_not_waited_for(
    serve: Serve, connect: Connect, fault: str
) -> None:
    worker = Raw([])
    node = Node(await serve(worker, interval_s=3600.0, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await until(lambda: worker.requests)
    await node.leaves(first)
    (copy,) = (copy for _, copy in node.left._left.values())
    assert copy.can_be_taken
    setattr(node.balancer.services.workers.all[0], fault, True)
    assert not copy.can_be_taken
    node.left.sweep()
    await worker.closed.wait()
    await until(node.is_level)


async def test_two_clients_that_both_wait_get_two_answers(serve: Serve, connect: Connect) -> None:
    worker = Raw([], [])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    await node.send(asked())
    await node.send(asked())
    await until(lambda: len(worker.requests) == 2)


@pytest.mark.parametrize(
    ("path", "resend_s"), [(b"/v1/messages", 0.0), (b"/v1/messages/count_tokens", 5.0)]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_computes_nothing_or_may_not_wait_stops_at_once(
    serve: Serve, connect: Connect, path: bytes, resend_s: float, stream: bool
) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=resend_s), connect)
    first = await node.send(asked(path=path, stream=stream))
    await until(lambda: worker.requests)
    await node.gone(first)
    await worker.closed.wait()
    await until(node.is_level)


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/chat/completions", b"/v1/responses"])
async def test_a_whole_answer_goes_to_the_client_that_asks_again(
    serve: Serve, connect: Connect, path: bytes, has_ended: bool
) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked("Hello", b"x-request-id: one", path=path, stream=False))
    await until(lambda: worker.requests)
    await node.leaves(first)
    whole = answer(b'{"n": 1}')
    if has_ended:
        worker.go_on(whole)
        await until(lambda: not node.balancer.services.workers.all[0].in_flight)
    again = asked("Hello", b"x-request-id: two", path=path, stream=False)
    second = await node.send(again)
    await until(lambda: not len(node.left))
    if not has_ended:
        worker.go_on(whole)
    head, body = await second.answer()
    assert body == b'{"n": 1}'
    assert b": two\r\n" in head
    assert b": one\r\n" not in head
    assert len(worker.requests) == 1
    await until(node.is_level)
    # The connection takes the next request, which is a new one.
    assert (await second.ask(again))[1] == b"{}"


async def test_a_whole_answer_waits_for_nobody_forever(serve: Serve, connect: Connect) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked(stream=False))
    await until(lambda: worker.requests)
    await node.leaves(first)
    worker.go_on(answer(b'{"n": 1}'))
    await until(lambda: not node.balancer.services.workers.all[0].in_flight)
    assert node.balancer.account.used > 0
    node.clock.now_s = 5.0
    node.left.sweep()
    assert len(node.left) == 0
    await until(node.is_level)


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
async def test_a_whole_answer_that_is_too_large_or_an_error_is_asked_for_anew(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, status: bytes
) -> None:
    monkeypatch.setattr(exchange, "MAX_SENT_BYTES", 100)
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked(stream=False))
    await until(lambda: worker.requests)
    await node.leaves(first)
    body = b'"%b"' % (b"x" * 100) if status == b"200 OK" else b"{}"
    worker.go_on(answer(body).replace(b"200 OK", status))
    await until(lambda: not len(node.left))
    await until(node.is_level)
    second = await node.send(asked(stream=False))
    assert (await second.answer())[1] == b"{}"
    assert len(worker.requests) == 2


async def test_a_whole_answer_and_a_stream_are_two_requests(serve: Serve, connect: Connect) -> None:
    worker = Raw([], [])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked(stream=False))
    await until(lambda: worker.requests)
    await node.leaves(first)
    await node.send(asked(stream=True))
    await until(lambda: len(worker.requests) == 2)
    assert len(node.left) == 1


async def test_an_answer_beyond_the_buffer_stops_at_once(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_SENT_BYTES", len(ONE) + 1)
    assert resends.MAX_SENT_BYTES == 256 * 1024
    worker = Raw([*OPEN, *chunked(ONE, TWO, end=b"")])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await head_of(first)
    got = await event_of(first)
    while got != ONE + TWO:
        got += await event_of(first)
    await node.gone(first)
    await worker.closed.wait()
    await until(node.is_level)


async def test_an_answer_that_outgrows_the_buffer_stops_soon(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_SENT_BYTES", len(ONE) + 1)
    worker = Raw([*OPEN, *chunked(ONE, end=b"")])
    node = Node(await serve(worker, interval_s=3600.0, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await head_of(first)
    await node.leaves(first)
    (copy,) = (copy for _, copy in node.left._left.values())
    worker.go_on(chunked(TWO, end=b"")[0])
    await until(lambda: not copy.can_be_taken)
    node.left.sweep()
    await worker.closed.wait()
    await until(node.is_level)


async def test_what_was_sent_counts_and_gives_way_when_memory_is_short(
    serve: Serve, connect: Connect
) -> None:
    large = b"data: %b\n\n" % (b"x" * 40_000)
    worker = Raw([*OPEN, *chunked(large, end=b"")])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    account = node.balancer.account
    first = await node.send(asked())
    await head_of(first)
    assert await event_of(first) == large
    assert account.used >= len(large)
    other = account.hold("")
    other.set(account.limit_bytes // 2)
    worker.go_on(chunked(ONE, end=b"")[0])
    assert await event_of(first) == ONE
    await until(lambda: account.used == other.size)
    other.release()
    await node.gone(first)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_copy_that_fails_without_a_client_is_sent_anew(
    serve: Serve, connect: Connect, has_begun: bool
) -> None:
    worker = Raw([*OPEN, *chunked(ONE, end=b"")] if has_begun else [])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await until(lambda: worker.requests)
    if has_begun:
        await head_of(first)
    await node.leaves(first)
    if has_begun:
        assert worker._writer is not None
        worker._writer.transport.abort()
    else:
        worker.go_on(answer(b"{}").replace(b"200 OK", b"400 Bad Request"))
    await until(lambda: not len(node.left))
    await until(node.is_level)
    worker.answers = [sse(TWO)]
    _, events = await (await node.send(asked())).stream()
    assert events == TWO
    assert len(worker.requests) == 2


async def test_each_client_of_a_waiting_request_is_told_to_wait(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    beats = node.balancer.services.heartbeats
    beats.interval_s, beats.clock = 0.0, node.clock
    first = await node.send(asked())
    await until(lambda: worker.requests)
    node.clock.now_s = 10.0
    beats.sweep()
    await head_of(first)
    await node.leaves(first)
    assert len(beats) == 0
    second = await node.send(asked())
    await until(lambda: not len(node.left))
    node.clock.now_s = 20.0
    beats.sweep()
    await head_of(second)
    assert (await event_of(second)).startswith(b"event: ping")
    worker.go_on(b"".join(sse(ONE)))
    assert await event_of(second) == ONE


async def test_a_prefill_of_400_s_is_computed_once_though_its_client_leaves_after_300(
    serve: Serve, connect: Connect
) -> None:
    """Neither of its two connections is silent for more than 15 s."""
    worker = Raw([])
    node = Node(await serve(worker, interval_s=3600.0, resend_s=RESEND_S), connect)
    beats, sent = node.balancer.services.heartbeats, node.balancer.services.metrics.heartbeats
    beats.clock, beats.interval_s = node.clock, 1.0
    first = await node.send(asked())
    await until(lambda: worker.requests)
    heard = {first: [0.0]}

    async def wait(wire: Wire, until_s: int) -> None:
        while node.clock.now_s < until_s:
            node.clock.now_s += 1
            before = sent.counts[()]
            beats.sweep()
            node.left.sweep()
            if sent.counts[()] > before:
                if len(heard[wire]) == 1:
                    await head_of(wire)
                assert await event_of(wire) == b'event: ping\ndata: {"type": "ping"}\n\n'
                heard[wire].append(node.clock.now_s)

    await wait(first, 300)
    await node.leaves(first)
    heard[first].append(node.clock.now_s)
    node.clock.now_s += 1
    second = await node.send(asked())
    await until(lambda: not len(node.left))
    heard[second] = [node.clock.now_s]
    await wait(second, 400)
    worker.go_on(b"".join(sse(ONE, TWO)))
    got = await event_of(second)
    while got != ONE + TWO:
        got += await event_of(second)
    heard[second].append(node.clock.now_s)
    for times in heard.values():
        assert max(after - before for before, after in pairwise(times)) <= 15
    assert len(worker.requests) == 1
    await until(node.is_level)


async def test_the_log_has_each_id_once(serve: Serve, connect: Connect) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked("Hello", b"x-request-id: one"))
    await until(lambda: worker.requests)
    await node.leaves(first)
    second = await node.send(asked("Hello", b"x-request-id: two"))
    await until(lambda: not len(node.left))
    worker.go_on(b"".join(sse(ONE)))
    await second.stream()
    log = node.balancer.services.request_log
    found = [orjson.loads(await log.find(id) or b"{}") for id in ("one", "two")]
    assert [line["outcome"] for line in found] == ["disconnected", "complete"]
    assert len(log._remembered) == 2


async def test_a_balancer_that_ends_stops_what_has_no_client(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([])
    node = Node(await serve(worker, resend_s=RESEND_S), connect)
    first = await node.send(asked())
    await until(lambda: worker.requests)
    await node.leaves(first)
    await node.balancer.stop()
    await worker.closed.wait()
    assert node.is_level()


# Several processes: the copy comes to another one.


class Processes:
    """Processes of one balancer, each a node of its own, whose clients' requests wait."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @classmethod
    async def started(
        cls, serve: Serve, connect: Connect, folder: Path, worker: Raw, count: int = 2, **more: Any
    ) -> Processes:
        config = {"resend_s": RESEND_S, "interval_s": 3600.0, "folder": folder, **more}
        groups = process_groups(count)
        return cls([Node(await serve(worker, group=g, **config), connect) for g in groups])

    async def leaves(self, number: int, wire: Wire) -> None:
        """Its client leaves this process, and the others know."""
        await self.nodes[number].leaves(wire)
        others = [node for node in self.nodes if node is not self.nodes[number]]
        await until(lambda: all(node.left.elsewhere for node in others))

    def are_level(self) -> bool:
        return all(node.is_level() for node in self.nodes)

    def counted(self) -> float:
        """The requests that were answered, in all processes."""
        counts = [node.balancer.services.metrics.requests.counts for node in self.nodes]
        return sum(each["/v1/messages", 200] for each in counts)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_copy_that_comes_to_another_process_takes_over(
    serve: Serve, connect: Connect, tmp_path: Path, stream: bool
) -> None:
    worker = Raw([])
    processes = await Processes.started(serve, connect, tmp_path, worker)
    one, other = processes.nodes
    first = await one.send(asked("Hello", b"x-request-id: one", stream=stream))
    await until(lambda: worker.requests)
    await processes.leaves(0, first)
    second = await other.send(asked("Hello", b"x-request-id: two", stream=stream))
    await until(lambda: not len(one.left))
    if stream:
        worker.go_on(b"".join(sse(ONE, TWO)))
        head, body = await second.stream()
        assert b"cache-control: no-cache\r\n" in head
    else:
        worker.go_on(answer(b'{"n": 1}'))
        head, body = await second.answer()
    assert body == (ONE + TWO if stream else b'{"n": 1}')
    assert head.count(b"x-request-id: two\r\n") == head.count(b"\r\nrequest-id: two\r\n") == 1
    assert b": one\r\n" not in head
    assert len(worker.requests) == 1
    assert one.balancer.services.metrics.resent_requests.counts[()] == 1
    assert processes.counted() == 1
    await until(processes.are_level)
    # The connection takes the next request, which is a new one.
    assert (await second.ask(asked(stream=False)))[1] == b"{}"


async def test_each_process_can_get_the_next_copy(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    worker = Raw([*OPEN, *chunked(ONE, end=b"")])
    processes = await Processes.started(serve, connect, tmp_path, worker, count=3)
    one, *others = processes.nodes
    wire = await one.send(asked())
    await head_of(wire)
    for node in (*others, others[0]):
        assert await event_of(wire) == ONE
        wire.writer.transport.abort()
        await until(lambda: len(one.left) == 1)
        await until(lambda: all(other.left.elsewhere for other in others))
        wire = await node.send(asked())
        await head_of(wire)
    assert await event_of(wire) == ONE
    worker.go_on(b"".join(chunked(TWO)))
    assert await event_of(wire) == TWO
    assert await wire.reader.readexactly(5) == b"0\r\n\r\n"
    assert len(worker.requests) == 1
    await until(processes.are_level)


async def test_each_copy_of_a_waiting_request_is_told_to_wait_in_its_own_process(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    worker = Raw([])
    processes = await Processes.started(serve, connect, tmp_path, worker, count=3)
    one, *others = processes.nodes
    beats = one.balancer.services.heartbeats
    beats.interval_s, beats.clock = 0.0, one.clock
    wire = await one.send(asked())
    await until(lambda: worker.requests)
    for node in others:
        wire.writer.transport.abort()
        await until(lambda: len(one.left) == 1)
        await until(lambda: all(other.left.elsewhere for other in others))
        wire = await node.send(asked())
        await until(lambda: not len(one.left))
        one.clock.now_s += 10.0
        beats.sweep()
        await head_of(wire)
        assert (await event_of(wire)).startswith(b"event: ping")
    worker.go_on(b"".join(sse(ONE)))
    assert await event_of(wire) == ONE
    assert len(worker.requests) == 1


async def test_a_tenant_s_key_is_checked_where_the_first_copy_is(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    alice, bob = (b"x-api-key: " + keys.add_key(path, name)[0].encode() for name in ("a", "b"))
    worker = Raw([], [])
    processes = await Processes.started(serve, connect, tmp_path, worker, keys=str(path))
    first = await processes.nodes[0].send(asked("Hello", alice))
    await until(lambda: worker.requests)
    await processes.leaves(0, first)
    await processes.nodes[1].send(asked("Hello", bob))
    await until(lambda: len(worker.requests) == 2)
    second = await processes.nodes[1].send(asked("Hello", alice))
    await until(lambda: not len(processes.nodes[0].left))
    second.writer.transport.abort()
    await until(lambda: len(processes.nodes[0].left) == 1)
    assert len(worker.requests) == 2


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_copy_begins_anew_if_the_first_one_is_gone(
    serve: Serve, connect: Connect, tmp_path: Path, is_gone: bool
) -> None:
    worker = Raw([])
    processes = await Processes.started(serve, connect, tmp_path, worker)
    one, other = processes.nodes
    first = await one.send(asked())
    await until(lambda: worker.requests)
    await processes.leaves(0, first)
    if is_gone:
        await one.balancer.stop()
        socket_path(tmp_path, 0).unlink(missing_ok=True)
    else:
        one.left.close()
    worker.answers = [sse(TWO)]
    second = await other.send(asked())
    assert (await second.stream())[1] == TWO
    assert len(worker.requests) == 2
    assert processes.counted() == 1
    assert other.left.elsewhere == {}
    await until(processes.are_level)


async def test_a_process_that_ends_cuts_what_it_answers_for_another(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    worker = Raw([*OPEN, *chunked(ONE, end=b"")])
    processes = await Processes.started(serve, connect, tmp_path, worker)
    one, other = processes.nodes
    first = await one.send(asked())
    await head_of(first)
    await processes.leaves(0, first)
    second = await other.send(asked())
    await head_of(second)
    assert await event_of(second) == ONE
    for connection in tuple(one.balancer._connections):
        connection.abort()
    assert (await event_of(second)).startswith(b"event: error\n")
    await until(other.is_level)


def test_what_waits_elsewhere_is_bounded_and_forgotten() -> None:
    clock = Clock()
    left = Resends(str, 5.0, clock)
    left.folder = Path()
    for number in range(MOST_LEFT_ELSEWHERE + 1):
        left.left_elsewhere(b"%d" % number, 1)
    assert len(left.elsewhere) == MOST_LEFT_ELSEWHERE
    assert left.holder(b"0") is None
    assert left.holder(b"1") is left.holder(b"2") is not None
    assert left.holder(b"1") is None
    clock.now_s = 4.0
    left.left_elsewhere(b"new", 1)
    clock.now_s = 5.0
    left.sweep()
    assert [*left.elsewhere] == [b"new"]
