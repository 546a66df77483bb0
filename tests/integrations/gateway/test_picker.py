"""What the endpoint picker says to a gateway that follows its protocol, message by message."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sgl_ext.integrations.gateway import messages
from sgl_ext.integrations.gateway.gateway import EnvoyGateway
from sgl_ext.integrations.gateway.messages import (
    BODY_SEND_MODES,
    DESTINATION,
    FULL_DUPLEX_STREAMED,
    NONE,
    SERVICE,
)
from sgl_ext.limits.bounds import MAX_ELEMENTS
from tests.balancer.conftest import Engine
from tests.balancer.wire import until
from tests.integrations.gateway.conftest import Ask, Listen, Pick
from tests.integrations.gateway.gateway import CHAT, MESSAGES, Asked, Picker, running_picker
from tests.waiting import HANG_S

HIDDEN = (FULL_DUPLEX_STREAMED, NONE)
RESPONSES = "/v1/responses"


def talk(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def test_a_request_is_sent_to_an_engine_with_its_body_and_the_balancers_headers(
    pick: Pick, ask: Ask, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef-secret")
    (tmp_path / "key").write_text("0123456789abcdef-key")
    engine = Engine("one")
    picker = await pick(
        engine,
        api_key=f"file:{tmp_path / 'key'}",
        engine_secret=f"file:{tmp_path / 'secret'}",
    )
    asked = ask(picker)
    body = talk("Hello", stream=False)
    destination, sent = await asked.request(
        body,
        authorization="Bearer 0123456789abcdef-key",
        x_sgl_ext_rank="7",
        x_sgl_ext_queued_s="99",
        x_sgl_ext_window_s="99",
        x_other="kept",
    )
    assert destination == engine.url.removeprefix("http://")
    assert orjson.loads(sent) == body
    # As on every way to an engine: its secret is there, and the client cannot set what it believes.
    assert asked.changed["x-sgl-ext-engine-secret"] == "0123456789abcdef-secret"
    assert asked.changed["x-sgl-ext-rank"] == "0"
    assert {"authorization", "x-sgl-ext-queued-s", "x-sgl-ext-window-s"} <= {*asked.removed}
    assert "x-other" not in {*asked.changed, *asked.removed}
    assert picker.in_flight == [1]
    assert await asked.complete(b'{"usage": {}}') == b'{"usage": {}}'
    assert picker.in_flight == [0]
    assert picker.metric("requests", CHAT, 200) == 1


async def test_a_wrong_key_is_refused_before_the_body_comes(
    pick: Pick, ask: Ask, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("0123456789abcdef-key")
    picker = await pick(Engine("one"), api_key=f"file:{tmp_path / 'key'}")
    asked = ask(picker)
    await asked.head(MESSAGES, x_api_key="wrong")
    status, _, error = await asked.answered()
    assert (status, error["error"]["type"]) == (401, "authentication_error")


async def test_a_conversation_stays_at_its_engine(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), Engine("two"), Engine("three"))
    turns = talk("Conversation " * 100)
    first, _ = await (asked := ask(picker)).request(turns, x_session_id="s")
    await asked.complete()
    for _ in range(4):
        turns["messages"] += [
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "more"},
        ]
        destination, _ = await (asked := ask(picker)).request(turns, x_session_id="s")
        await asked.complete()
        assert destination.partition(",")[0] == first.partition(",")[0]
    assert picker.metric("placements", "home") == 4


async def test_other_engines_are_named_as_spare_ones(pick: Pick, ask: Ask) -> None:
    engines = [Engine(name) for name in "abcd"]
    picker = await pick(*engines)
    destination, _ = await ask(picker).request(talk("Hello"))
    named = destination.split(",")
    assert len(named) == len({*named}) == 3
    assert {*named} < {engine.url.removeprefix("http://") for engine in engines}


async def test_a_subset_is_kept_to(pick: Pick, ask: Ask, listen: Listen) -> None:
    engines = [Engine(name) for name in "abc"]
    picker = await pick(*engines)
    allowed = engines[1].url.removeprefix("http://")
    for _ in range(6):
        destination, _ = await ask(picker).request(talk("Hello"), subset=[allowed])
        assert destination == allowed
    asked = ask(picker)
    await asked.head(subset=["127.0.0.1:1"])
    await asked.body(orjson.dumps(talk("Hello")))
    assert (await asked.answered())[0] == 503
    asked = ask(picker)
    await asked.head(MESSAGES, subset=[])
    await asked.body(orjson.dumps(talk("Hello")))
    status, headers, error = await asked.answered()
    assert (status, error["error"]["type"]) == (529, "overloaded_error")
    assert "retry-after" in headers


async def test_a_conversation_leaves_its_engine_for_a_subset(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), Engine("two"))
    turns = talk("Conversation " * 400)
    first, _ = await (asked := ask(picker)).request(turns, x_session_id="s")
    await asked.complete()
    other = first.split(",")[1]
    asked = ask(picker)
    assert (await asked.request(turns, x_session_id="s", subset=[other]))[0] == other


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"[" * 100_000, 400, "JSON"),
        (b'{"max_tokens": "many"}', 400, "max_tokens"),
        (orjson.dumps({"messages": [], "tools": [0] * 3000}), 400, "tools"),
        (b'{"a": [' + b'"",' * MAX_ELEMENTS * 2 + b'""]}', 400, "150000"),
    ],
    ids=["no JSON", "deep", "a wrong type", "many tools", "many elements"],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_hostile_body_gets_an_error_in_its_protocol(
    pick: Pick, ask: Ask, path: str, body: bytes, status: int, word: str
) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.head(path)
    await asked.body(body)
    found, _, error = await asked.answered()
    assert found == status
    assert ("type" in error) is (path == MESSAGES)
    assert word in error["error"]["message"]
    assert picker.in_flight == [0]


async def test_a_body_over_the_limit_is_refused_before_it_is_complete(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), max_body_bytes=1000)
    asked = ask(picker)
    await asked.head(content_length="2000")
    assert (await asked.answered())[0] == 413
    asked = ask(picker)
    await asked.head()
    await asked.body(b" " * 600, ends=False)
    await asked.body(b" " * 600, ends=False)
    assert (await asked.answered())[0] == 413
    await until(lambda: picker.balancer.account.used == 0)


async def test_bodies_hold_no_more_than_the_byte_budget(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), byte_budget=10_000)
    first, second = ask(picker), ask(picker)
    await first.head()
    await first.body(b" " * 6000, ends=False)
    await until(lambda: picker.balancer.account.used == 6000)
    await second.head()
    await second.body(b" " * 6000, ends=False)
    assert (await second.answered())[0] == 503
    first.call.cancel()
    await until(lambda: picker.balancer.account.used == 0)


async def test_a_compressed_body_reaches_the_engine_uncompressed(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    body = orjson.dumps(talk("Hello " * 1000))
    asked = ask(picker)
    await asked.head(content_encoding="gzip")
    packed = gzip.compress(body)
    await asked.body(packed[:20], ends=False)
    await asked.body(packed[20:])
    _, sent = await asked.picked()
    assert sent == body
    assert "content-encoding" in asked.removed
    asked = ask(picker)
    await asked.head(content_encoding="br")
    assert (await asked.answered())[0] == 415


async def test_a_large_body_comes_back_as_it_was(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    body = orjson.dumps(talk("word " * 600_000))
    asked = ask(picker)
    await asked.head()
    for start in range(0, len(body), 100_000):
        part = body[start : start + 100_000]
        await asked.body(part, ends=start + 100_000 >= len(body))
    _, sent = await asked.picked()
    assert sent == body


async def test_trailers_end_a_request_and_an_answer(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.head()
    body = orjson.dumps(talk("Hello"))
    await asked.body(body, ends=False)
    await asked.trailers()
    await asked.told()
    part = (await asked.told()).request_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (body, False)
    assert (await asked.told()).WhichOneof("message") == "request_trailers"
    await asked.answer_head()
    await asked.answer_body(b"{}", ends=False)
    await asked.answer_trailers()
    assert (await asked.told()).WhichOneof("message") == "response_headers"
    part = (await asked.told()).response_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (b"{}", False)
    assert (await asked.told()).WhichOneof("message") == "response_trailers"
    assert picker.in_flight == [0]


async def test_a_stream_passes_event_by_event_and_states_its_usage(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.request(talk("Hello", stream=True))
    await asked.answer_head(content_type="text/event-stream")
    await asked.answer_body(b'data: {"a": 1}\n\ndata: {"b"', ends=False)
    assert (await asked.told()).WhichOneof("message") == "response_headers"
    part = (await asked.told()).response_body.response.body_mutation.streamed_response
    assert part.body == b'data: {"a": 1}\n\n', "whole events alone are passed on"
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    last = b': 2}\n\ndata: {"choices": [], "usage": %b}\n\n' % orjson.dumps(usage)
    await asked.answer_body(last)
    assert await asked.whole("response_body") == b'data: {"b"' + last
    (worker,) = picker.balancer.services.workers.all
    await until(lambda: picker.metric("output_tokens", worker.id) == 3)


async def test_a_gateway_that_leaves_ends_its_request(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.request(talk("Hello"))
    assert picker.in_flight == [1]
    asked.call.cancel()
    await until(lambda: picker.in_flight == [0])
    assert picker.metric("client_disconnects") == 1
    (worker,) = picker.balancer.services.workers.all
    assert worker.is_available, "the engine is not to blame"


async def test_the_engine_that_answers_counts_and_the_first_one_failed(
    pick: Pick, ask: Ask
) -> None:
    picker = await pick(Engine("one"), Engine("two"))
    asked = ask(picker)
    destination, _ = await asked.request(talk("Hello " * 500), x_session_id="s")
    first, second = destination.split(",")
    by_address = {w.url.removeprefix("http://"): w for w in picker.balancer.services.workers.all}
    assert by_address[first].in_flight == 1
    await asked.answer_head(served=second)
    await until(lambda: by_address[second].in_flight == 1)
    assert by_address[first].in_flight == 0
    assert by_address[first].breaker._failures == 1
    await asked.answer_body(b"{}")
    await until(lambda: picker.in_flight == [0, 0])
    assert picker.metric("retries") == 1
    # The conversation is there now.
    destination, _ = await ask(picker).request(talk("Hello " * 500), x_session_id="s")
    assert destination.partition(",")[0] == second


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "server_error"), (MESSAGES, "api_error")])
async def test_what_a_gateway_says_of_a_dead_engine_gets_the_callers_shape(
    pick: Pick, ask: Ask, path: str, kind: str
) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.request(path=path)
    await asked.answer_head(503, content_type="text/plain")
    status, _, error = await asked.answered()
    assert (status, error["error"]["type"]) == (502, kind)
    assert picker.metric("gateway_faults", "no answer") == 1
    assert picker.in_flight == [0]


@pytest.mark.parametrize("status", ["", "abc", "2_00", "+200", "0200", "100", "99"])
async def test_an_answer_without_a_status_is_an_error_at_once(
    pick: Pick, ask: Ask, status: str
) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.request(path=MESSAGES)
    await asked.answer_head(status)
    answer = await asked.answered()
    assert (answer[0], answer[2]["error"]["type"]) == (502, "api_error")
    assert picker.metric("gateway_faults", "unreadable answer") == 1
    assert await asked.call.read() is grpc.aio.EOF
    assert picker.in_flight == [0]


async def under_way(picker: Picker, asked: Asked) -> None:
    """Sends a request so large that the picker still writes it when its engine is chosen."""
    body = orjson.dumps(talk("x" * 8_000_000))
    await asked.head()
    for at in range(0, len(body), 1_000_000):
        await asked.body(body[at : at + 1_000_000], ends=at + 1_000_000 >= len(body))
    await until(lambda: picker.in_flight == [1])


async def ended(asked: Asked) -> grpc.StatusCode:
    """Reads on until the picker ends the stream; returns its status."""
    async with asyncio.timeout(HANG_S):
        with suppress(grpc.aio.AioRpcError):
            while await asked.call.read() is not grpc.aio.EOF:
                pass
        return await asked.call.code()


async def test_an_inner_error_ends_the_stream_while_a_message_is_written(
    pick: Pick, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bool:
        raise ZeroDivisionError

    picker = await pick(Engine("one"))
    asked = ask(picker)
    await under_way(picker, asked)
    monkeypatch.setattr(EnvoyGateway, "take_answer", broken)
    await asked.answer_head()
    assert await ended(asked) == grpc.StatusCode.INTERNAL
    assert picker.in_flight == [0]
    assert picker.metric("background_failures", "gateway stream") == 1


async def test_a_message_that_cannot_be_written_ends_the_stream(
    pick: Pick, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    picker = await pick(Engine("one"))
    monkeypatch.setattr(messages, "request_body", lambda *_, **__: ["no message"])
    asked = ask(picker)
    await asked.head()
    await asked.body(orjson.dumps(talk("Hello")))
    assert await ended(asked) == grpc.StatusCode.ABORTED
    assert picker.metric("gateway_faults", "unsent message") == 1
    assert picker.in_flight == [0]


async def test_an_engines_own_error_passes(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), Engine("two"))
    asked = ask(picker)
    await asked.request()
    await asked.answer_head(503, x_reason="full")
    await asked.answer_body(b'{"error": 1}')
    message = await asked.told()
    assert message.WhichOneof("message") == "response_headers"
    assert await asked.whole("response_body") == b'{"error": 1}'
    assert picker.metric("requests", CHAT, 503) == 1


async def test_an_engine_that_hangs_costs_an_error_and_no_wait(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.request(path=MESSAGES)
    (attempt,) = next(iter(picker.balancer.services.workers.all)).attempts
    attempt.abandon("it hangs")
    status, _, error = await asked.answered()
    assert (status, error["type"]) == (502, "error")
    # In the middle of an answer, the stream ends in its protocol's error event.
    asked = ask(picker)
    await asked.request(talk("Hello", stream=True), path=MESSAGES)
    await asked.answer_head(content_type="text/event-stream")
    await asked.answer_body(b"event: ping\ndata: {}\n\n", ends=False)
    await asked.told()
    await asked.told()
    (attempt,) = next(iter(picker.balancer.services.workers.all)).attempts
    attempt.abandon("it hangs")
    assert b"event: error" in await asked.whole("response_body")


async def test_a_request_waits_until_an_engine_has_capacity(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), max_in_flight=1)
    first, second = ask(picker), ask(picker)
    await first.request(talk("one"))
    await second.head()
    await second.body(orjson.dumps(talk("two")))
    queue = picker.balancer.services.models.default.queue
    await until(lambda: len(queue) == 1)
    await first.complete()
    await second.picked()
    assert float(second.changed["x-sgl-ext-queued-s"]) >= 0
    await second.complete()


async def test_a_full_queue_and_a_long_wait_are_overloads(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), max_in_flight=1, queue_timeout_s=0.01)
    await ask(picker).request(talk("one"))
    for path, status in ((CHAT, 503), (MESSAGES, 529)):
        asked = ask(picker)
        await asked.head(path)
        await asked.body(orjson.dumps(talk("two")))
        found, headers, _ = await asked.answered()
        assert (found, "retry-after" in headers) == (status, True)


async def test_a_tenant_over_its_limit_gets_429(pick: Pick, ask: Ask, tmp_path: Path) -> None:
    key = "0123456789abcdef-key-of-a"
    path = tmp_path / "keys.toml"
    path.write_text(
        "[tenants.a]\nrequests_per_minute = 1\n"
        f'[keys.one]\ntenant = "a"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n'
    )
    picker = await pick(Engine("one"), keys=str(path))
    await (asked := ask(picker)).request(talk("one"), x_api_key=key)
    await asked.complete()
    asked = ask(picker)
    await asked.head(x_api_key=key)
    await asked.body(orjson.dumps(talk("two")))
    status, headers, error = await asked.answered()
    assert (status, error["error"]["type"]) == (429, "rate_limit_error")
    assert "retry-after" in headers


async def test_without_an_engine_requests_get_503(ask: Ask) -> None:
    async with running_picker(["http://127.0.0.1:1"]) as picker:
        asked = ask(picker)
        await asked.head()
        await asked.body(orjson.dumps(talk("Hello")))
        assert (await asked.answered())[0] == 503


async def test_a_body_that_does_not_arrive_is_a_timeout(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), interval_s=3600)
    asked = ask(picker)
    await asked.head()
    await asked.body(b"{", ends=False)
    await until(lambda: picker.balancer.account.used)
    picker.balancer.sweep(asyncio.get_running_loop().time() + 90)
    assert (await asked.answered())[0] == 408
    # A stream without a head has no path, so it is ended.
    await until(lambda: not picker.picker._streams)
    asked = ask(picker)
    await until(lambda: picker.picker._streams)
    picker.balancer.sweep(asyncio.get_running_loop().time() + 900)
    assert await asked.call.code() == grpc.StatusCode.ABORTED


async def test_more_streams_than_allowed_are_refused(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), max_connections=1)
    await ask(picker).request()
    second = Asked(grpc.aio.insecure_channel(picker.address))
    await second.head()
    await second.body(b"{}")
    assert (await second.answered())[0] == 503
    assert picker.metric("connections_rejected") == 1


@pytest.mark.parametrize(
    ("modes", "word"),
    [
        (("BUFFERED", "FULL_DUPLEX_STREAMED"), "request_body_mode is BUFFERED"),
        (("FULL_DUPLEX_STREAMED", "STREAMED"), "response_body_mode is STREAMED"),
    ],
)
async def test_a_gateway_that_is_configured_wrongly_is_told_what_to_change(
    pick: Pick, ask: Ask, modes: tuple[str, str], word: str
) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    request_mode, answer_mode = map(BODY_SEND_MODES.index, modes)
    await asked.head(modes=(request_mode, answer_mode))
    status, _, error = await asked.answered()
    assert status == 500
    assert word in error["error"]["message"]
    assert picker.metric("gateway_faults", "configuration") == 1


async def test_a_gateway_of_the_gateway_api_need_not_say_its_modes(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    await (asked := ask(picker)).request(modes=None)
    await asked.complete()


async def test_answers_that_are_not_shown_count_until_the_stream_ends(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.request(talk("Hello", stream=True), modes=HIDDEN)
    await asked.answer_head(content_type="text/event-stream")
    assert (await asked.told()).WhichOneof("message") == "response_headers"
    (worker,) = picker.balancer.services.workers.all
    assert (worker.in_flight, worker.decoding) == (1, 1)
    await asked.call.done_writing()
    await until(lambda: picker.in_flight == [0])
    assert picker.metric("requests", CHAT, 200) == 1
    assert picker.metric("answers_without_usage", CHAT) == 1


async def test_what_needs_the_answer_is_refused_if_it_is_not_shown(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.head(RESPONSES, modes=HIDDEN)
    await asked.body(orjson.dumps({"model": "m", "input": "Hello", "store": True}))
    status, _, error = await asked.answered()
    assert status == 501
    assert "response_body_mode: NONE" in error["error"]["message"]


async def test_a_stored_response_goes_on(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"), store=":memory:")
    asked = ask(picker)
    await asked.request({"model": "m", "input": "One", "store": True}, path=RESPONSES)
    output = [{"type": "message", "role": "assistant", "content": [], "id": "msg_1"}]
    answer = {"id": "resp_1", "object": "response", "status": "completed", "output": output}
    made = orjson.loads(await asked.complete(orjson.dumps(answer)))
    asked = ask(picker)
    _, sent = await asked.request(
        {"model": "m", "input": "Two", "previous_response_id": made["id"]}, path=RESPONSES
    )
    assert b"One" in sent, "the earlier turn is put into the body"
    # The response is also read through the gateway.
    asked = ask(picker)
    await asked.head(f"{RESPONSES}/{made['id']}", method="GET", ends=True)
    status, _, found = await asked.answered()
    assert (status, found["id"]) == (200, made["id"])


async def test_a_get_is_picked_for_by_its_head(pick: Pick, ask: Ask) -> None:
    engine = Engine("one")
    picker = await pick(engine)
    asked = ask(picker)
    await asked.head("/v1/models", method="GET", ends=True)
    message = await asked.told()
    assert message.WhichOneof("message") == "request_headers"
    await asked.answer_head()
    await asked.answer_body(b"{}")
    await asked.told()
    assert await asked.whole("response_body") == b"{}"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ({"path": "/sgl_ext/workers", "method": "GET", "ends": True}, 403),
        ({"path": "/metrics", "method": "GET", "ends": True}, 404),
        ({"path": "/flush_cache"}, 403),
        ({"path": "/unknown"}, 404),
        ({"path": RESPONSES, "method": "GET", "ends": True, "upgrade": "websocket"}, 501),
        ({"path": CHAT, "method": "PUT"}, 405),
    ],
)
async def test_what_a_gateway_must_not_reach_is_refused(
    pick: Pick, ask: Ask, head: dict[str, Any], status: int
) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.head(**head)
    assert (await asked.answered())[0] == status


async def test_a_malformed_head_is_refused(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.head(x_other="a\r\nx-sgl-ext-rank: 1")
    assert (await asked.answered())[0] == 400


async def test_a_message_out_of_turn_is_counted(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("one"))
    asked = ask(picker)
    await asked.head()
    await asked.answer_body(b"{}")
    await until(lambda: picker.metric("gateway_faults", "unexpected message") == 1)


async def test_health_follows_the_engines(ask: Ask, listen: Listen) -> None:
    address = await listen(Engine("one"))
    async with (
        running_picker([f"http://{address}"]) as picker,
        grpc.aio.insecure_channel(picker.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "readiness", "liveness", SERVICE):
            found = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        (worker,) = picker.balancer.services.workers.all
        worker.draining = True
        async with asyncio.timeout(HANG_S):
            changed = await watched.read()
        assert changed.status == health_pb2.HealthCheckResponse.NOT_SERVING
        found = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()


async def test_a_picker_that_drains_finishes_requests_and_refuses_new_ones(
    ask: Ask, listen: Listen
) -> None:
    engine = Engine("one")
    async with running_picker([f"http://{await listen(engine)}"], drain_s=60) as picker:
        running = ask(picker)
        await running.request(talk("one"))
        ending = asyncio.create_task(picker.balancer.stop())
        await until(lambda: picker.balancer.draining)
        asked = ask(picker)
        await asked.head(MESSAGES)
        assert (await asked.answered())[0] == 529
        assert await running.complete(b"{}") == b"{}"
        await ending


async def test_a_picker_that_ends_answers_what_still_runs(ask: Ask, listen: Listen) -> None:
    engine = Engine("one")
    async with running_picker([f"http://{await listen(engine)}"], drain_s=0) as picker:
        waiting = ask(picker)
        await waiting.request(talk("one"))
        ending = asyncio.create_task(picker.balancer.stop())
        assert (await waiting.answered())[0] == 503
        await ending


async def test_a_pair_of_prefill_and_decode_engines_serves(pick: Pick, ask: Ask) -> None:
    class Role(Engine):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/ready":
                return web.Response(headers={"x-sgl-ext-role": self.name})
            return await super().handle(request)

    prefill, decode = Role("prefill 8998"), Role("decode")
    picker = await pick(prefill, decode)
    asked = ask(picker)
    destination, _ = await asked.request(talk("Hello"))
    assert destination == decode.url.removeprefix("http://")
    assert DESTINATION in asked.changed
    await until(lambda: [path for path, _, _ in prefill.seen if path == CHAT])
    rooms = [headers["x-sgl-ext-bootstrap"] for path, _, headers in prefill.seen if path == CHAT]
    assert rooms == [asked.changed["x-sgl-ext-bootstrap"]]
    await asked.complete()
    assert picker.in_flight == [0, 0]
