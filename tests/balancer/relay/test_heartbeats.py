"""No stream is silent for long: what its client gets while its answer is awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import orjson
import pytest
from wsproto.events import Ping, TextMessage

from sgl_ext.balancer.relay.heartbeats import AGAIN_S, Heartbeats
from sgl_ext.balancer.server import Balancer
from sgl_ext.protocols.errors import OPENAI_ERRORS, openai_body
from sgl_ext.protocols.registry import of_path
from tests.balancer.conftest import Connect, Serve
from tests.balancer.relay.test_responses_socket import CREATE, Bare
from tests.balancer.wire import Raw, Wire, answer, request, sse, until
from tests.sdk_models import problems
from tests.waiting import HANG_S

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
COMMENT = b": waiting\n\n"
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
BEATS = {MESSAGES: PING, CHAT: COMMENT, RESPONSES: COMMENT, "/generate": COMMENT}
SAID = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": SAID, "max_tokens": 5},
    CHAT: {"messages": SAID},
    RESPONSES: {"input": "Hello", "store": False},
    "/generate": {"text": "Hello"},
}


class Stream:
    failed = False

    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1
        if self.failed:
            raise RuntimeError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stream_gets_a_first_beat_and_then_one_again_and_again() -> None:
    clock, faults = Clock(), list[str]()
    beats = Heartbeats(faults.append, 10.0, clock=clock)
    first, failing, later, answered = (Stream() for _ in range(4))
    failing.failed = True
    for stream in (first, failing, answered):
        beats.begin(stream)
    clock.now_s = 4.0
    beats.begin(later)
    beats.end(answered)
    seen = []
    for clock.now_s in (9.0, 10.0, 13.0, 14.0, 24.0, 25.0, 29.0, 40.0):
        beats.sweep()
        seen.append((first.beats, later.beats))
    assert seen == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 1), (2, 1), (2, 2), (3, 2)]
    assert (failing.beats, answered.beats, faults) == (3, 0, ["heartbeats"] * 3)
    for stream in (first, failing, later):
        beats.end(stream)
    assert len(beats) == 0
    assert AGAIN_S == 15.0


def test_a_beat_comes_before_its_time_and_never_after_it() -> None:
    clock, stream = Clock(), Stream()
    beats = Heartbeats(str, 10.0, 1.0, clock)
    beats.begin(stream)
    clock.now_s = 9.0
    beats.sweep()
    assert stream.beats == 1


def test_without_a_first_beat_there_is_none() -> None:
    clock, stream = Clock(), Stream()
    beats = Heartbeats(str, 0.0, clock=clock)
    beats.begin(stream)
    clock.now_s = 1e6
    beats.sweep()
    assert (stream.beats, len(beats)) == (0, 0)


class Waits:
    """A balancer whose time passes when a test says so."""

    def __init__(self, balancer: Balancer) -> None:
        self.beats = balancer.services.heartbeats
        self.beats.interval_s = 0.0
        self.beats.clock = self.clock = Clock()

    def passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.beats.sweep()


def asked(path: str, *lines: bytes, **fields: Any) -> bytes:
    body = orjson.dumps(BODIES[path] | {"stream": True} | fields)
    return request(body, *lines, path=path.encode())


async def head_of(wire: Wire) -> bytes:
    return await wire.reader.readuntil(b"\r\n\r\n")


async def chunk_of(wire: Wire) -> bytes:
    size = int(await wire.reader.readuntil(b"\r\n"), 16)
    return (await wire.reader.readexactly(size + 2))[:-2]


@pytest.mark.parametrize(("path", "beat"), BEATS.items())
async def test_a_stream_says_that_it_waits_and_goes_on(
    serve: Serve, connect: Connect, path: str, beat: bytes
) -> None:
    worker = Raw([])
    balancer = await serve(worker)
    waits, wire = Waits(balancer), await connect(balancer)
    wire.writer.write(asked(path, b"x-request-id: mine"))
    await until(lambda: worker.requests)
    waits.passes(9.0)
    waits.passes(1.0)
    head = await head_of(wire)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    for line in (b"content-type: text/event-stream", b"cache-control: no-cache"):
        assert head.count(b"\r\n%b\r\n" % line) == 1
    assert b"\r\nx-accel-buffering: no\r\n" in head
    assert b": mine\r\n" in head
    assert await chunk_of(wire) == beat
    waits.passes(AGAIN_S)
    assert await chunk_of(wire) == beat
    worker.go_on(b"".join(sse(b'data: {"n": 1}\n\n')))
    assert await chunk_of(wire) == b'data: {"n": 1}\n\n'
    waits.passes(AGAIN_S)  # the answer has begun
    assert await wire.reader.readexactly(5) == b"0\r\n\r\n"
    assert len(waits.beats) == 0
    assert (await wire.ask(asked(path, stream=False)))[1] == b"{}", "the connection goes on"


async def test_only_streams_of_events_get_beats(serve: Serve, connect: Connect) -> None:
    worker = Raw([], [], [])
    balancer = await serve(worker)
    waits = Waits(balancer)
    wires = [await connect(balancer) for _ in range(3)]
    plain = {"model": "m", "messages": SAID}
    wires[0].writer.write(asked(CHAT, stream=False))
    wires[1].writer.write(request(orjson.dumps(plain | {"stream": True}), path=b"/api/chat"))
    wires[2].writer.write(request(b'{"input": "a", "stream": true}', path=b"/v1/embeddings"))
    await until(lambda: len(worker.requests) == 3)
    assert len(waits.beats) == 0


async def test_a_stream_in_the_queue_gets_beats_and_its_rejection_is_an_event(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([])
    balancer = await serve(worker, max_in_flight=1, queue_timeout_s=100.0)
    waits, queue, clock = Waits(balancer), balancer.services.models.default.queue, Clock()
    queue.clock = clock
    first, second = [await connect(balancer) for _ in range(2)]
    first.writer.write(asked(MESSAGES))
    await until(lambda: worker.requests)
    second.writer.write(asked(MESSAGES))
    await until(lambda: len(queue))
    waits.passes(10.0)
    await head_of(second)
    assert await chunk_of(second) == PING
    clock.now_s = 101.0
    queue.sweep()
    event = await chunk_of(second)
    assert event.startswith(b"event: error\ndata: ")
    assert orjson.loads(event.partition(b"data: ")[2])["error"]["type"] == "overloaded_error"
    assert await second.reader.readexactly(5) == b"0\r\n\r\n"


ERRORS = {
    MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"t","message":"No."}}\n\n',
    CHAT: b'data: {"error":{"type":"t","message":"No."}}\n\n',
    RESPONSES: b'event: error\ndata: {"type":"error","code":"t","message":"No.","param":null,'
    b'"sequence_number":0}\n\n',
}


@pytest.mark.parametrize("path", ERRORS)
@pytest.mark.parametrize("is_late", [False, True])
async def test_an_error_keeps_its_status_until_the_first_beat(
    serve: Serve, connect: Connect, path: str, is_late: bool
) -> None:
    body = b'{"error": {"type": "t", "message": "No."}}'
    if path == MESSAGES:
        body = b'{"type": "error", "error": {"type": "t", "message": "No."}}'
    refusal = answer(body).replace(b"200 OK", b"400 Bad Request")
    worker = Raw([])
    balancer = await serve(worker)
    waits, wire = Waits(balancer), await connect(balancer)
    wire.writer.write(asked(path))
    await until(lambda: worker.requests)
    if not is_late:
        worker.go_on(refusal)
        head, told = await wire.answer()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert told == body
        return
    waits.passes(10.0)
    worker.go_on(refusal)
    _, events = await wire.stream()
    assert events == BEATS[path] + ERRORS[path]


async def test_an_engine_that_dies_after_a_beat_is_replaced(serve: Serve, connect: Connect) -> None:
    workers = [Raw([]), Raw([])]
    balancer = await serve(*workers)
    waits, wire = Waits(balancer), await connect(balancer)
    wire.writer.write(asked(CHAT))
    await until(lambda: workers[0].requests or workers[1].requests)
    dead, other = workers if workers[0].requests else workers[::-1]
    waits.passes(10.0)
    assert dead._writer is not None
    dead._writer.transport.abort()
    await until(lambda: other.requests)
    waits.passes(AGAIN_S)
    other.go_on(b"".join(sse(b"data: [DONE]\n\n")))
    _, events = await wire.stream()
    assert events == COMMENT + COMMENT + b"data: [DONE]\n\n"


async def test_a_client_that_leaves_gets_no_more_beats(serve: Serve, connect: Connect) -> None:
    worker = Raw([])
    balancer = await serve(worker)
    waits, wire = Waits(balancer), await connect(balancer)
    wire.writer.write(asked(CHAT))
    await until(lambda: worker.requests)
    waits.passes(10.0)
    await head_of(wire)
    wire.writer.transport.abort()
    await until(lambda: not len(waits.beats))


async def test_a_websocket_gets_pings(serve: Serve, connect: Connect) -> None:
    worker = Raw([])
    balancer = await serve(worker, interval_s=3600.0)
    waits, socket = Waits(balancer), await Bare.open(await connect(balancer))
    message = orjson.dumps(CREATE | {"input": "Hello"}).decode()
    socket.send(TextMessage(data=message))
    await until(lambda: worker.requests)
    waits.passes(10.0)
    assert isinstance((await socket.events(Ping))[0], Ping)
    worker.go_on(answer(b'{"error": {"message": "No."}}').replace(b"200 OK", b"400 Bad Request"))
    (error,) = await socket.events(TextMessage)
    assert orjson.loads(error.data)["status"] == 400


MESSAGE = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


def anthropic_events() -> bytes:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": MESSAGE},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "Hi."},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop"},
    ]
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (each["type"].encode(), orjson.dumps(each)) for each in events
    )


@pytest.mark.parametrize("path", ERRORS)
def test_the_sdks_models_have_beats_and_late_errors(path: str) -> None:
    late = b'{"type": "error", "error": {"type": "api_error", "message": "No."}}'
    events = anthropic_events() if path == MESSAGES else b""
    error = of_path(path).errors.late(orjson.loads(late), 0)
    if path == CHAT:
        error = OPENAI_ERRORS.late(orjson.loads(openai_body(503, "No.")), 0)
    assert problems(path, 200, "text/event-stream", BEATS[path] + events + error) == []


async def test_the_sdks_read_a_stream_with_beats(serve: Serve) -> None:
    worker = Raw([], [], [])
    balancer = await serve(worker)
    waits, url = Waits(balancer), f"http://127.0.0.1:{balancer.port}"

    async def answered(count: int, events: bytes) -> None:
        await until(lambda: len(worker.requests) == count)
        waits.passes(10.0)
        waits.passes(AGAIN_S)
        worker.go_on(b"".join(sse(events)))

    said: Any = SAID
    claude = anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
    gpt = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)

    async def message() -> str:
        async with claude.messages.stream(model="m", max_tokens=5, messages=said) as stream:
            return await stream.get_final_text()

    async def chat() -> str:
        stream = await gpt.chat.completions.create(model="m", messages=said, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def response() -> list[str]:
        stream = await gpt.responses.create(model="m", input="Hello", store=False, stream=True)
        return [event.type async for event in stream]

    choice = {"index": 0, "delta": {"content": "Hi."}, "finish_reason": None}
    piece = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    pieces = b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(piece | {"choices": [choice]})
    late = {"type": "response.output_text.delta", "delta": "Hi.", "sequence_number": 1}
    late |= {"item_id": "i", "output_index": 0, "content_index": 0, "logprobs": []}
    delta = b"event: response.output_text.delta\ndata: %b\n\n" % orjson.dumps(late)
    asks: list[tuple[Any, bytes, Any]] = [
        (message, anthropic_events(), "Hi."),
        (chat, pieces, "Hi."),
        (response, delta, ["response.output_text.delta"]),
    ]
    async with asyncio.timeout(HANG_S), claude, gpt:
        for number, (ask, events, expected) in enumerate(asks, 1):
            found, _ = await asyncio.gather(ask(), answered(number, events))
            assert found == expected
