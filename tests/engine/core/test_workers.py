"""Several HTTP processes of an engine: who answers what, and how a request gets there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from sgl_ext.engine.core.workers import Workers, share_work, stop_watching
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.http.secret import SecretMiddleware
from sgl_ext.engine.http_server import WorkerMiddleware
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.settings.secrets import EngineSecret
from sgl_ext.wire.events import EVENTS_PATH
from sgl_ext.wire.headers import CONVERSATION_HEADER, SECRET_HEADER
from sgl_ext.wire.orders import SETTINGS_PATH

MESSAGES = "/v1/messages"
SECRET = "the-secret-of-this-engine"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    monkeypatch.setenv("SGLEXT_SECRET_OF_TEST", SECRET)
    return tmp_path


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= before


def scope_of(path: str, conversation: str | None = None, method: str = "POST") -> dict[str, Any]:
    named = [] if conversation is None else [(CONVERSATION_HEADER.encode(), conversation.encode())]
    headers = [*named, (SECRET_HEADER.encode(), SECRET.encode())]
    scope = {"type": "http", "path": path, "headers": headers, "method": method}
    return {**scope, "query_string": b"beta=true"}


def test_all_turns_of_a_conversation_have_one_worker() -> None:
    numbers = {Workers(n, 4).of_request(scope_of(MESSAGES, "1f")) for n in range(4)}
    assert numbers == {0x1F % 4}


def test_what_an_engine_has_once_is_with_the_lead() -> None:
    for path in (EVENTS_PATH, SETTINGS_PATH, "/v1/pins"):
        assert Workers(2, 3).of_request(scope_of(path)) == 0


@pytest.mark.parametrize(
    "scope",
    [
        scope_of("/ready"),
        scope_of("/metrics", "0"),
        scope_of(MESSAGES),
        scope_of(MESSAGES, "no number"),
    ],
    ids=["probe", "metrics", "no conversation", "no number"],
)
def test_anything_else_is_answered_where_it_arrives(scope: dict[str, Any]) -> None:
    assert Workers(2, 3).of_request(scope) == 2


def test_one_process_answers_everything() -> None:
    assert Workers().of_request(scope_of(MESSAGES, "7")) == 0
    assert Workers().serve_all()


def test_a_worker_in_the_place_of_another_that_has_ended_ends_the_engine(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_work(2)
    assert os.environ["SGLANG_HTTP_SERVER_APP_PATH"] == "sgl_ext.engine.worker:app"
    assert [(w.number, w.count) for w in (Workers.claim(), Workers.claim())] == [(0, 2), (1, 2)]
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: ended.append(args))
    with pytest.raises(SystemExit, match="a tokenizer worker has ended"):
        Workers.claim()
    assert ended == [(os.getppid(), signal.SIGTERM)]


def test_no_child_is_said_to_have_crashed_when_an_engine_ends(environment: None) -> None:
    stopped: list[bool] = []
    share_work(2, SimpleNamespace(stop=lambda: stopped.append(True)))
    stop_watching()
    assert stopped == [True]


async def nothing() -> None:
    pass


async def test_no_worker_waits_for_one_that_has_ended(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_work(2)
    left = Workers.claim()
    Workers.claim()
    monkeypatch.setattr(os, "kill", lambda *_: None)
    with pytest.raises(SystemExit):
        Workers.claim()
    await left.drained(nothing)


async def test_the_lead_finishes_when_no_worker_has_requests_and_before_any_ends() -> None:
    lead, second, third = (Workers(number, 3) for number in range(3))
    did: list[str] = []

    async def finish() -> None:
        did.append("finished")

    async def drain(worker: Workers) -> None:
        await worker.drained(finish if worker.is_lead else nothing)
        did.append("ended")

    tasks = [asyncio.create_task(drain(lead)), asyncio.create_task(drain(second))]
    await asyncio.sleep(0)
    assert not did
    await drain(third)
    await asyncio.gather(*tasks)
    assert did == ["finished", "ended", "ended", "ended"]


async def test_no_worker_waits_for_one_that_had_no_requests() -> None:
    async with serving(2) as (first, _):
        pass
    await first.workers.drained(nothing)


class Engine:
    """An application that says which worker it is in, and what it was sent."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.left, self.asked = asyncio.Event(), asyncio.Event()
        self.answers, self.cleared = True, 0
        secret = EngineSecret("env:SGLEXT_SECRET_OF_TEST")
        self.app = SecretMiddleware(WorkerMiddleware(self.answer, workers), secret)

    def clear(self) -> None:
        self.cleared += 1

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        if not self.answers:
            self.asked.set()
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        status = 201 if scope["path"] == MESSAGES else 200
        headers = [(b"content-type", b"text/plain"), (b"x-worker", b"%d" % self.workers.number)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in (scope["query_string"], b" ", message["body"]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serving(count: int, *, ended: int = 0) -> AsyncIterator[list[Engine]]:
    """So many workers, of which the last ones have ended."""
    engines = [Engine(Workers(number, count)) for number in range(count)]
    async with AsyncExitStack() as stack:
        for each in engines[: count - ended]:
            await stack.enter_async_context(each.workers.serving(each.app, each.clear))
        yield engines


def client_of(engine: Engine) -> httpx.AsyncClient:
    transport, headers = httpx.ASGITransport(engine.app), {SECRET_HEADER: SECRET}
    return httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers)


async def test_a_request_of_another_worker_is_answered_by_it_and_relayed_whole() -> None:
    async with serving(2) as (first, _), client_of(first) as client:
        for conversation, worker in (("2", "0"), ("3", "1"), ("5", "1")):
            headers = {CONVERSATION_HEADER: conversation}
            answer = await client.post(f"{MESSAGES}?beta=true", content=b"body", headers=headers)
            assert (answer.status_code, answer.text) == (201, "beta=true body")
            assert answer.headers["x-worker"] == worker
            assert answer.headers["content-type"] == "text/plain"


async def test_another_worker_checks_the_secret_too() -> None:
    async with serving(2) as (first, _), client_of(first) as client:
        headers = {CONVERSATION_HEADER: "1", SECRET_HEADER: "a guess"}
        assert (await client.post(MESSAGES, headers=headers)).status_code == 401


async def test_a_body_without_the_secret_is_not_read() -> None:
    sent = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    async with serving(2) as (first, _):
        scope = scope_of(MESSAGES)
        scope["headers"] = [(CONVERSATION_HEADER.encode(), b"1"), (b"host", b"engine")]
        await first.app(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_a_request_of_a_worker_that_has_ended_is_for_another_engine() -> None:
    async with serving(2, ended=1) as (first, _), client_of(first) as client:
        answer = await client.post(MESSAGES, headers={CONVERSATION_HEADER: "1"})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "This engine is shutting down."


async def test_an_engine_is_ready_once_each_worker_takes_requests_of_the_others() -> None:
    async with serving(2, ended=1) as (first, second):
        assert not first.workers.serve_all()
        async with second.workers.serving(second.app, second.clear):
            assert first.workers.serve_all()


async def test_a_client_that_leaves_leaves_the_worker_that_answers_too() -> None:
    async with serving(2) as (first, second):
        second.answers = False
        messages = [{"type": "http.request", "body": b""}]
        left = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError

        task = asyncio.create_task(first.app(scope_of(MESSAGES, "1"), receive, send))
        await second.asked.wait()
        left.set()
        await task
        await second.left.wait()


async def told(engine: Engine, path: str) -> list[bytes | None]:
    """What the others answer when a route of this worker tells them of its request."""
    answers: list[bytes | None] = []

    async def route(scope: Any, *_: Any) -> None:
        answers.extend(await engine.workers.tell(scope, b"body"))

    async def unused(*_: Any) -> Any:
        raise AssertionError

    app = SecretMiddleware(
        WorkerMiddleware(route, engine.workers), EngineSecret("env:SGLEXT_SECRET_OF_TEST")
    )
    await app(scope_of(path), unused, unused)
    return answers


async def test_what_concerns_all_workers_is_told_to_each_with_the_secret() -> None:
    async with serving(3) as (first, *_):
        assert await told(first, "/anything") == [b"beta=true body", b"beta=true body"]
        assert await told(first, MESSAGES) == [None, None], "they answer 201"
    async with serving(2, ended=1) as (first, _):
        assert await told(first, "/anything") == [None]
    assert await told(Engine(Workers()), "/anything") == [], "there is no other"


async def test_a_cleared_cache_is_told_to_all_others_and_by_no_client() -> None:
    async with serving(3) as engines, client_of(engines[0]) as client:
        extension = HttpExtension(EngineSettings(), workers=engines[0].workers)
        dropped: list[str] = []
        extension.next_turns = cast("Any", SimpleNamespace(drop_all=dropped.append))
        extension.broadcasters[0].on_cleared()
        assert extension._telling is not None
        await extension._telling
        assert dropped == ["flushed"]
        assert [each.cleared for each in engines] == [0, 1, 1]
        await client.post("/cleared")
        assert [each.cleared for each in engines] == [0, 1, 1]
