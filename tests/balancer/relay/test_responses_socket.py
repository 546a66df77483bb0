"""The WebSocket mode of /v1/responses, with an ordinary client and with bare bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, web
from openai.types.responses import Response
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Event, Ping, Pong, TextMessage

from sgl_ext import keys
from sgl_ext.balancer.conversations.response_turns import ConnectionTurns
from sgl_ext.balancer.relay.responses_socket import messages_of
from sgl_ext.balancer.server import Balancer
from sgl_ext.limits.bounds import (
    LARGE_BODY_BYTES,
    MAX_LANES,
    MAX_SOCKET_MESSAGES,
    SOCKET_IDLE_S,
    SOCKET_PING_S,
    UNREAD_S,
)
from sgl_ext.limits.byte_account import ByteAccount
from tests.balancer.conftest import Connect, Engine, Serve, Start
from tests.balancer.conversations.test_conversation_store import (
    CALL,
    PATH,
    RESULT,
    Answering,
    ask,
    said,
    user,
)
from tests.balancer.wire import Raw, Wire, process_groups, sse, until
from tests.waiting import HANG_S

CREATE = {"type": "response.create", "model": "m", "store": False}
KINDS = ["response.created", "response.output_text.delta", "response.completed"]


async def receive(socket: ClientWebSocketResponse) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(await socket.receive_str(timeout=HANG_S))
    return event


async def turn(socket: ClientWebSocketResponse, **fields: Any) -> list[dict[str, Any]]:
    """Sends a message, and returns the events up to the last one."""
    await socket.send_str(orjson.dumps({**CREATE, **fields}).decode())
    events = [await receive(socket)]
    while events[-1]["type"] not in ("response.completed", "response.failed", "error"):
        events.append(await receive(socket))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


# Turns.


async def test_turns_that_are_not_stored_continue_on_their_connection(start: Start) -> None:
    engine = Answering(CALL)
    stand_in = engine.engine()
    client = await start(stand_in)
    headers = {"session-id": "s", "x-request-id": "of-the-handshake"}
    async with client.ws_connect(PATH, headers=headers) as socket:
        assert kinds(await turn(socket, input="One", tools=[])) == KINDS
        events = await turn(socket, input=[RESULT], previous_response_id=engine.ids[0])
        assert events[0]["response"]["previous_response_id"] == engine.ids[0]
        await turn(socket, input="Three", previous_response_id=engine.ids[1])
    whole = [user("One"), CALL, RESULT, CALL, user("Three")]
    assert engine.bodies[2] == {"model": "m", "store": False, "input": whole, "stream": True}
    _, _, sent = stand_in.seen[-1]
    assert (sent["session-id"], sent["content-type"]) == ("s", "application/json")
    assert sent["x-request-id"] != "of-the-handshake"
    assert not [name for name in sent if name.lower().startswith(("sec-websocket", "upgrade"))]


async def test_what_codex_says_of_each_turn_is_a_header_of_its_request(start: Start) -> None:
    engine = Answering().engine()
    client = await start(engine)
    name = "x-codex-turn-metadata"
    async with client.ws_connect(PATH, headers={name: "of the handshake"}) as socket:
        for value in ("of the turn", "a\r\nx-tenant-id: other", 5, None):
            await turn(socket, input="One", client_metadata={name: value})
    assert [sent[name] for _, _, sent in engine.seen] == ["of the turn", *["of the handshake"] * 3]
    assert not any("x-tenant-id" in sent for _, _, sent in engine.seen)


async def test_another_connection_does_not_know_them(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    async with client.ws_connect(PATH) as first, client.ws_connect(PATH) as second:
        await turn(first, input="One")
        [event] = await turn(second, input="Two", previous_response_id=engine.ids[0])
        assert (event["type"], event["status"]) == ("error", 400)
        assert event["error"]["code"] == "previous_response_not_found"
        assert event["error"]["param"] == "previous_response_id"
        assert kinds(await turn(second, input="Two")) == KINDS


async def test_stored_turns_continue_on_and_off_a_connection(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    async with client.ws_connect(PATH) as socket:
        await turn(socket, input="Two", previous_response_id=engine.ids[0], store=True)
        await turn(socket, input="Not kept", previous_response_id=engine.ids[1])
    await ask(client, {"input": "Three", "previous_response_id": engine.ids[1]})
    turns = [user("One"), said("Hi"), user("Two"), said("Hi")]
    assert engine.bodies[2]["input"] == [*turns, user("Not kept")]
    assert engine.bodies[3]["input"] == [*turns, user("Three")]
    status, _ = await ask(client, {"input": "Four", "previous_response_id": engine.ids[2]})
    assert status == 400


async def test_a_connection_remembers_where_nothing_is_stored(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine(), store_limit_bytes=0)
    async with client.ws_connect(PATH) as socket:
        await turn(socket, input="One", store=True)
        await turn(socket, input="Two", store=True, previous_response_id=engine.ids[0])
    assert engine.bodies[1]["input"] == [user("One"), said("Hi"), user("Two")]


@pytest.mark.parametrize("status", [202, 503, 400])
async def test_a_prompt_can_be_prefilled_and_continued(start: Start, status: int) -> None:
    engine = Answering()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/prefill":
            return web.json_response({"error": {"message": "no"}}, status=status)
        return await engine.answer(request)

    stand_in = Engine("a", answer)
    client = await start(stand_in)
    async with client.ws_connect(PATH) as socket:
        events = await turn(socket, input="One", generate=False)
        path, body, _ = stand_in.seen[0]
        assert path == "/v1/prefill?wait=false&protocol=responses"
        assert orjson.loads(body)["input"] == "One"
        if status == 400:
            assert (events[0]["status"], events[0]["error"]["message"]) == (400, "no")
            return
        assert kinds(events) == ["response.created", "response.completed"]
        response = events[-1]["response"]
        assert Response.model_validate(response).output == []
        await turn(socket, input="Two", previous_response_id=response["id"])
    assert engine.bodies[0]["input"] == [user("One"), user("Two")]


async def test_lanes_are_answered_at_once_and_each_in_its_order(start: Start) -> None:
    engine, go_on = Answering(), asyncio.Event()
    begun: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        begun.append(orjson.loads(await request.read())["input"])
        if begun[-1] == "a1":
            await go_on.wait()
        return await engine.answer(request)

    client = await start(Engine("a", answer))
    async with client.ws_connect(PATH) as socket:
        for lane, text in (("a", "a1"), ("a", "a2"), ("b", "b1")):
            await socket.send_json({**CREATE, "stream_id": lane, "input": text})
        events = [await receive(socket) for _ in KINDS]
        assert ({event["stream_id"] for event in events}, kinds(events)) == ({"b"}, KINDS)
        assert sorted(begun) == ["a1", "b1"]
        go_on.set()
        events = [await receive(socket) for _ in (*KINDS, *KINDS)]
        assert ({event["stream_id"] for event in events}, begun[2:]) == ({"a"}, ["a2"])


async def test_a_large_message_is_read_elsewhere_and_in_its_order(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    async with client.ws_connect(PATH) as socket:
        large = {**CREATE, "input": "x" * (LARGE_BODY_BYTES + 1)}
        await socket.send_json(large)
        await socket.send_json({**CREATE, "input": "small"})
        for _ in (*KINDS, *KINDS):
            await receive(socket)
    assert [len(body["input"]) for body in engine.bodies] == [len(large["input"]), 5]


# Errors.


async def test_a_large_message_that_is_no_json_is_an_error_event(start: Start) -> None:
    client = await start(Answering().engine())
    async with client.ws_connect(PATH) as socket:
        await socket.send_str("x" * (LARGE_BODY_BYTES + 1))
        assert (await receive(socket))["status"] == 400
        assert kinds(await turn(socket, input="One")) == KINDS


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        ("[]", "type"),
        ('{"type": "response.steer"}', "type"),
        (orjson.dumps({**CREATE, "background": True}).decode(), "background"),
        (orjson.dumps({**CREATE, "stream_id": 5}).decode(), "stream_id"),
        (orjson.dumps({**CREATE, "generate": "no"}).decode(), "generate"),
    ],
)
async def test_a_bad_message_is_an_error_event_and_the_connection_goes_on(
    start: Start, message: str, param: str | None
) -> None:
    client = await start(Answering().engine())
    async with client.ws_connect(PATH) as socket:
        await socket.send_str(message)
        event = await receive(socket)
        assert (event["type"], event["status"]) == ("error", 400)
        assert event["error"]["type"] == "invalid_request_error"
        assert event["error"]["param"] == param
        assert kinds(await turn(socket, input="One")) == KINDS


async def test_an_error_says_whether_to_retry(start: Start) -> None:
    client = await start(Engine("a", lambda _: _busy()), max_in_flight=1)
    async with client.ws_connect(PATH) as socket:
        [event] = await turn(socket, input="One")
        assert (event["status"], event["error"]["message"]) == (429, "busy")
        assert event["headers"]["retry-after"] == "3"


async def _busy() -> web.Response:
    error = {"error": {"message": "busy", "type": "rate_limit_error", "param": None, "code": None}}
    return web.json_response(error, status=429, headers={"retry-after": "3"})


async def test_a_stream_that_is_cut_ends_in_an_error(serve: Serve) -> None:
    created = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    balancer = await serve(Raw([*sse(created, end=b""), None]))
    async with ClientSession() as client, client.ws_connect(address(balancer)) as socket:
        events = await turn(socket, input="One")
        assert kinds(events) == ["response.created", "error"]
        assert events[1]["status"] == 502
        assert events[1]["error"]["type"] == "server_error"


@pytest.mark.parametrize("data", [b'{"type":"error","message":"m"}', b'{"error":{"message":"m"}}'])
def test_an_error_of_a_stream_has_a_status_and_its_fields_below_error(data: bytes) -> None:
    [message] = messages_of(b"event: error\ndata: %b\n\n" % data)
    event = orjson.loads(message)
    assert event["status"] >= 500
    assert event["error"]["message"] == "m"


# A message that is sent again on another connection.


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_copy_on_another_connection_takes_over_and_is_continued(
    serve: Serve, tmp_path: Path, processes: int, has_ended: bool
) -> None:
    worker = Raw([])
    config = {"resend_s": 5.0, "interval_s": 3600.0, "folder": tmp_path}
    groups = process_groups(processes)
    balancers = [await serve(worker, group=group, **config) for group in groups]
    one, other = balancers[0], balancers[-1]
    left = one.services.resends
    response = {"id": "resp_1", "object": "response", "output": [said("Hi")], "status": "completed"}
    whole = [
        b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **about}))
        for kind, about in (
            ("response.created", {"response": {**response, "status": "in_progress"}}),
            ("response.output_text.delta", {"delta": "Hi"}),
            ("response.completed", {"response": response}),
        )
    ]
    async with ClientSession() as client:
        async with client.ws_connect(address(one)) as first:
            await first.send_json({**CREATE, "input": "One"})
            await until(lambda: worker.requests)
        await until(lambda: len(left) == 1)
        await until(lambda: one is other or other.services.resends.elsewhere)
        if has_ended:
            worker.go_on(b"".join(sse(*whole)))
            await until(lambda: not one.services.workers.all[0].in_flight)
        async with client.ws_connect(address(other)) as second:
            await second.send_json({**CREATE, "input": "One"})
            await until(lambda: not len(left))
            if not has_ended:
                worker.go_on(b"".join(sse(*whole)))
            assert [(await receive(second))["type"] for _ in KINDS] == KINDS
            assert len(worker.requests) == 1
            await second.send_json(
                {**CREATE, "input": "Two", "previous_response_id": "resp_1", "stream_id": "lane"}
            )
            await until(lambda: len(worker.requests) == 2)
            sent = orjson.loads(worker.requests[1].partition(b"\r\n\r\n")[2])
            assert sent["input"] == [user("One"), said("Hi"), user("Two")]
    left.close()
    await until(lambda: one.account.used == other.account.used == 0)


# Handshakes.


def address(balancer: Balancer) -> str:
    return f"http://127.0.0.1:{balancer.port}{PATH}"


def opening(*lines: bytes, version: bytes = b"13", path: bytes = PATH.encode()) -> bytes:
    start = (b"GET %b HTTP/1.1" % path, b"host: localhost", b"connection: Upgrade")
    more = (b"upgrade: websocket", b"sec-websocket-version: " + version)
    return b"\r\n".join([*start, *more, *lines, b"", b""])


KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="


@pytest.mark.parametrize(
    ("sent", "status", "named"),
    [
        (opening(), b"400", b"sec-websocket-key"),
        (opening(b"sec-websocket-key: short"), b"400", b"sec-websocket-key"),
        (opening(KEY, version=b"8"), b"426", b"sec-websocket-version: 13\r\n"),
        (opening(KEY, b"origin: https://a.example"), b"403", b"origin"),
        (opening(KEY, path=b"/v1/chat/completions"), b"405", b"allow: POST"),
        (opening(KEY).replace(b"Upgrade\r\n", b"close\r\n", 1), b"405", b"allow: POST"),
    ],
)
async def test_a_bad_handshake_is_an_answer(
    serve: Serve, connect: Connect, sent: bytes, status: bytes, named: bytes
) -> None:
    wire = await connect(await serve(Raw()))
    head, body = await wire.ask(sent)
    assert head.startswith(b"HTTP/1.1 " + status)
    assert named in head + body


async def test_a_handshake_needs_a_key(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATOR_KEY", "secret")
    client = await start(Answering().engine(), api_key="env:OPERATOR_KEY")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(PATH, headers=headers)
        assert refused.value.status == 401
    headers = {"authorization": "Bearer secret"}
    async with client.ws_connect(PATH, headers=headers) as socket:
        assert kinds(await turn(socket, input="One")) == KINDS


async def test_a_key_that_is_withdrawn_is_refused_on_an_open_connection(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    key, name = keys.add_key(path, "a")
    engine = Answering()
    stand_in = engine.engine()
    client = await start(stand_in, keys=str(path))
    headers = {"authorization": f"Bearer {key}", "x-tenant-id": "b"}
    async with client.ws_connect(PATH, headers=headers) as socket:
        await turn(socket, input="One")
        assert stand_in.seen[0][2]["x-tenant-id"] == "a"
        keys.revoke_key(path, name)
        async with asyncio.timeout(HANG_S):
            while (event := (await turn(socket, input="Two"))[-1])["type"] != "error":
                pass
        assert (event["status"], event["error"]["code"]) == (401, "invalid_api_key")


# Frames.


CREATED = b'data: {"type":"response.created"}\n\n'


class Bare:
    """A WebSocket on a bare connection, whose frames are written as the test says."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.frames = Connection(ConnectionType.CLIENT)

    @classmethod
    async def open(cls, wire: Wire, more: bytes = b"") -> Bare:
        wire.writer.write(opening(KEY) + more)
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head  # of RFC 6455
        assert b"extensions" not in head.lower()
        return cls(wire)

    def send(self, *events: Event) -> None:
        self.wire.writer.write(b"".join(map(self.frames.send, events)))

    async def events(self, kind: type[Event] = CloseConnection) -> list[Any]:
        """What is received up to an event of this kind."""
        found: list[Event] = []
        async with asyncio.timeout(HANG_S):
            while True:
                for event in self.frames.events():
                    found.append(event)
                    if isinstance(event, CloseConnection):
                        self.wire.writer.close()
                    if isinstance(event, kind):
                        return found
                data = await self.wire.reader.read(1 << 16)
                assert data, "closed without a close frame"
                self.frames.receive_data(data)


def create(**fields: Any) -> TextMessage:
    return TextMessage(data=orjson.dumps({**CREATE, **fields}).decode())


async def test_frames_may_come_with_the_handshake_and_a_ping_is_answered(
    serve: Serve, connect: Connect
) -> None:
    wire = await connect(await serve(Raw(sse(CREATED, b"data: [DONE]\n\n"))))
    client = Connection(ConnectionType.CLIENT)
    text = create(input="One").data
    more = [client.send(TextMessage(data=part, message_finished=False)) for part in text]
    more += [client.send(Ping(payload=b"now")), client.send(TextMessage(data=""))]
    bare = await Bare.open(wire, b"".join(more))
    [pong, event] = await bare.events(TextMessage)
    assert isinstance(pong, Pong)
    assert (pong.payload, orjson.loads(event.data)["type"]) == (b"now", "response.created")
    bare.send(CloseConnection(code=1000))
    [closed] = await bare.events()
    assert closed.code == 1000


@pytest.mark.parametrize(
    ("sent", "code", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1002, None),  # garbage
        (b"\x81\x02{}", 1002, None),  # not masked
        (b"\xc1\x82\0\0\0\0{}", 1002, None),  # compressed
        (b"\x81\x82\0\0\0\0\xff\xff", 1007, None),  # not UTF-8
        (b"\x89\xfe\xff\xff\0\0\0\0", 1002, None),  # a ping of 65,535 bytes
        (b"\x82\x82\0\0\0\0{}", 1003, 415),  # binary
        (b"\x81\xff" + b"\xff" * 8 + b"\0\0\0\0", 1002, None),  # 2^64 bytes
        (b"\x81\xff" + (1 << 40).to_bytes(8) + b"\0\0\0\0" + b"x" * 100_001, 1009, 413),
    ],
)
async def test_bad_frames_end_the_connection(
    serve: Serve, connect: Connect, sent: bytes, code: int, status: int | None
) -> None:
    balancer = await serve(Raw(), max_body_bytes=100_000)
    bare = await Bare.open(await connect(balancer))
    bare.wire.writer.write(sent)
    *told, closed = await bare.events()
    assert closed.code == code
    assert [orjson.loads(event.data)["status"] for event in told] == ([status] if status else [])
    assert balancer.account.used == 0


async def test_a_message_needs_room_in_the_byte_budget(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw(), byte_budget=600_000, max_body_bytes=500_000)
    taken = balancer.account.hold("")
    taken.set(550_000)
    bare = await Bare.open(await connect(balancer))
    bare.send(create(input="x" * 100_000))
    error, closed = await bare.events()
    assert (orjson.loads(error.data)["status"], closed.code) == (503, 1013)
    taken.release()
    assert balancer.account.used == 0


async def test_a_client_that_hangs_up_ends_its_responses(serve: Serve, connect: Connect) -> None:
    worker = Raw(sse(CREATED, end=b""))
    balancer = await serve(worker)
    bare = await Bare.open(await connect(balancer))
    bare.send(create(input="One"), create(input="Two"))
    await bare.events(TextMessage)
    bare.wire.writer.transport.abort()
    async with asyncio.timeout(HANG_S):
        await worker.closed.wait()
    assert len(worker.requests) == 1
    await until(lambda: balancer.account.used == 0)


@pytest.mark.parametrize("is_json", [True, False])
async def test_a_client_that_hangs_up_leaves_no_large_message(
    serve: Serve, connect: Connect, is_json: bool
) -> None:
    worker = Raw()
    balancer = await serve(worker)
    bare = await Bare.open(await connect(balancer))
    text = "x" * (LARGE_BODY_BYTES + 1)
    bare.send(create(input=text) if is_json else TextMessage(data=text))
    await until(lambda: balancer.account.used > 2 * LARGE_BODY_BYTES)  # another process reads it
    bare.wire.writer.transport.abort()
    await until(lambda: balancer.account.used == 0)
    assert worker.requests == []


async def test_a_client_that_does_not_read_holds_its_stream_up_and_is_cut(
    serve: Serve, connect: Connect
) -> None:
    event = b'data: {"type":"x","delta":"%b"}\n\n' % (b"y" * 60_000)
    worker = Raw(sse(*[event] * 800, end=b""))
    balancer = await serve(worker)
    bare = await Bare.open(await connect(balancer))
    bare.send(*[create(input="One") for _ in range(2 * MAX_SOCKET_MESSAGES)])
    [connection] = balancer._connections
    await until(lambda: connection.paused)
    assert balancer.account.used < 30 << 20
    bare.send(*[Ping(payload=b"x" * 100) for _ in range(10_000)])
    connection.time_out()
    await worker.closed.wait()
    await until(lambda: balancer.account.used == 0)
    assert UNREAD_S < SOCKET_IDLE_S


async def test_no_more_messages_are_taken_than_may_wait(serve: Serve, connect: Connect) -> None:
    worker = Raw(*[sse(CREATED, end=b"") for _ in range(9)])
    balancer = await serve(worker)
    bare = await Bare.open(await connect(balancer))
    bare.send(*[create(input="x" * 1000, stream_id=f"{k % 9}") for k in range(500)])
    await bare.events(TextMessage)
    held = MAX_SOCKET_MESSAGES * 1200
    await until(lambda: len(worker.requests) == 9)
    assert 0 < balancer.account.used < held


async def test_pings_a_late_message_and_an_idle_hour(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw(), interval_s=3600.0)
    late, idle = [await Bare.open(await connect(balancer)) for _ in range(2)]
    late.send(TextMessage(data="{", message_finished=False))
    now = balancer.now
    await until(lambda: any(connection._text for connection in balancer._connections))
    balancer.sweep(now + SOCKET_PING_S + 1)
    assert isinstance((await late.events(Ping))[0], Ping)
    assert isinstance((await idle.events(Ping))[0], Ping)
    balancer.sweep(now + 100)
    error, closed = await late.events()
    assert (orjson.loads(error.data)["status"], closed.code) == (408, 1008)
    balancer.sweep(now + SOCKET_IDLE_S + 40)
    *_, closed = await idle.events()
    assert closed.code == 1001


async def test_a_drain_lets_a_response_end_and_then_closes(serve: Serve, connect: Connect) -> None:
    worker = Raw(sse(CREATED, end=b""))
    balancer = await serve(worker, drain_s=20)
    busy = await Bare.open(await connect(balancer))
    idle = await Bare.open(await connect(balancer))
    late = await connect(balancer)
    busy.send(create(input="One"))
    await busy.events(TextMessage)
    stopping = asyncio.create_task(balancer.stop())
    await until(lambda: balancer.draining)
    head, _ = await late.ask(opening(KEY))
    assert head.startswith(b"HTTP/1.1 503")
    idle.send(create(input="Two"))
    error, closed = await idle.events()
    assert (orjson.loads(error.data)["status"], closed.code) == (503, 1001)
    worker.go_on(b"0\r\n\r\n")
    [closed] = await busy.events()
    assert closed.code == 1001
    await stopping


async def test_the_end_of_the_balancer_is_told(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw(sse(CREATED, end=b"")))
    bare = await Bare.open(await connect(balancer))
    bare.send(create(input="One"))
    await bare.events(TextMessage)
    await balancer.stop()
    error, closed = await bare.events()
    assert (orjson.loads(error.data)["type"], closed.code) == ("error", 1001)


# What a connection remembers.


def test_turns_are_kept_as_long_as_a_lanes_latest_continues_them() -> None:
    account = ByteAccount(1 << 20)
    forgotten: list[int] = []
    turns = ConnectionTurns(account.hold(""), lambda: forgotten.append(1), limit_bytes=100)
    one, two = turns.lane(None), turns.lane("b")
    one.add("1", "stored", b"a" * 30)
    one.add("2", "1", b"b" * 30)
    assert one.chain("2") == ([b"a" * 30, b"b" * 30], "stored")
    two.add("3", "1", b"c" * 30)
    assert (two.chain("3")[1], account.used) == ("stored", 90)
    one.add("4", None, b"d" * 30)  # a new conversation: 2 is dropped, 1 is still continued by 3
    assert (one.chain("2"), one.chain("4")) == (([], "2"), ([b"d" * 30], None))
    one.add("5", "4", b"e" * 30)
    assert (forgotten, account.used, one.chain("5")) == ([1], 0, ([], "5"))


def test_lanes_are_bounded_and_an_ended_connection_keeps_nothing() -> None:
    account = ByteAccount(1 << 20)
    turns = ConnectionTurns(account.hold(""), lambda: None)
    for lane in range(MAX_LANES + 1):
        turns.add(str(lane), f"r{lane}", None, b"x")
    assert (turns.chain("r0"), account.used) == (([], "r0"), MAX_LANES)
    turns.close()
    turns.add(None, "late", None, b"x")
    assert account.used == 0
