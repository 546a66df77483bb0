"""A balancer and engines that share a secret, or do not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext.wire.headers import SECRET_HEADER
from tests.balancer.conftest import Engine, Start
from tests.waiting import HANG_S

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Guarded(Engine):
    """An engine with a secret. It keeps the secret that came with each request, by path."""

    def __init__(self, name: str, secret: str = OLD) -> None:
        super().__init__(name)
        self.secret = secret
        self.probe_secret = ""  # another one for probes, as before the next of them
        self.given: dict[str, list[str]] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.getall(SECRET_HEADER, [])
        self.given.setdefault(request.path, []).extend(given)
        secret = (request.path == "/ready" and self.probe_secret) or self.secret
        if given == [secret]:
            return await super().handle(request)
        error = {"error": {"message": "refused"}}
        return web.json_response(error, status=401, headers={SECRET_HEADER: "refused"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.secret"
    path.write_text(OLD)
    return path


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - when is decided by the balancer's intervals
            await asyncio.sleep(0.005)


async def workers(client: ClientSession) -> list[dict[str, Any]]:
    async with client.get("/sgl_ext/workers") as answer:
        found: list[dict[str, Any]] = (await answer.json())["workers"]
        return found


async def until_ready(client: ClientSession, *ready: bool) -> None:
    async with asyncio.timeout(HANG_S):
        while [w["ready"] for w in await workers(client)] != list(ready):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_whatever_an_engine_gets_carries_the_secret_and_clients_cannot_send_one(
    start: Start, file: Path
) -> None:
    engine = Guarded("a")
    client = await start(engine, engine_secret=f"file:{file}")
    own = {SECRET_HEADER: "made up by a client"}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/flush_cache"),
        ("DELETE", "/v1/pins"),
        ("GET", "/v1/loads"),
    ):
        body = BODY if path == "/v1/chat/completions" else None
        async with client.request(method, path, json=body, headers=own) as answer:
            assert answer.status == 200, path
            assert OLD not in f"{answer.headers}{await answer.text()}"
        assert {*engine.given[path]} == {OLD}
    assert set(engine.given["/ready"] + engine.given["/sgl_ext/events"]) == {OLD}


@pytest.mark.parametrize("source", [None, NEW])
async def test_an_engine_that_refuses_the_balancer_is_not_used_and_the_reason_is_shown(
    source: str | None, start: Start, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, source or OLD)
    caplog.set_level(logging.WARNING)
    engine = Guarded("a")
    given = {} if source is None else {"engine_secret": f"file:{file}"}
    client = await start(engine, **given)
    async with client.post("/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 503
    (worker,) = await workers(client)
    assert (worker["ready"], worker["breaker"]) == (False, "closed")
    assert "refuses the engine-secret" in worker["fault"]
    async with client.get("/metrics") as answer:
        assert f'sgl_ext_worker_secret_refused{{worker="{engine.url}"}} 1.0' in await answer.text()
    lines = [line for line in caplog.messages if "refuses the engine-secret" in line]
    assert lines == [f"{engine.url} refuses the engine-secret of this balancer"]
    assert "/v1/chat/completions" not in engine.given
    engine.secret = source or "none"
    await until_ready(client, True)
    assert (await workers(client))[0]["fault"] == ""


async def test_a_request_that_meets_a_changed_secret_goes_to_another_engine(
    start: Start, file: Path
) -> None:
    engines = [Guarded("a"), Guarded("b")]
    client = await start(*engines, engine_secret=f"file:{file}", interval_s=60)

    async def ask() -> str:
        session = {"x-sgl-ext-session-id": "one"}
        async with client.post("/v1/chat/completions", json=BODY, headers=session) as answer:
            assert answer.status == 200
            return str((await answer.json())["engine"])

    home = await ask()
    assert await ask() == home
    (refusing,) = [engine for engine in engines if engine.name == home]
    refusing.secret, refusing.probe_secret = NEW, OLD
    assert await ask() != home
    assert await ask() != home
    assert len(refusing.given["/v1/chat/completions"]) == 3
    shown = {worker["url"]: worker for worker in await workers(client)}
    assert "refuses the engine-secret" in shown[refusing.url]["fault"]
    assert {worker["breaker"] for worker in shown.values()} == {"closed"}


async def test_when_all_refuse_the_client_gets_an_overload_and_never_a_401(
    start: Start, file: Path
) -> None:
    engines = [Guarded("a"), Guarded("b")]
    client = await start(*engines, engine_secret=f"file:{file}", interval_s=60)
    for engine in engines:
        engine.secret, engine.probe_secret = NEW, OLD
    async with client.post("/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 503
        assert SECRET_HEADER not in answer.headers


async def test_a_changed_secret_is_sent_without_a_restart(start: Start, file: Path) -> None:
    engine = Guarded("a")
    client = await start(engine, engine_secret=f"file:{file}")
    async with client.post("/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 200
    engine.secret = NEW
    write(file, "short")
    await until_ready(client, False)
    write(file, f"{NEW}\n{OLD}\n")
    await until_ready(client, True)
    async with client.post("/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 200
    assert engine.given["/v1/chat/completions"] == [OLD, NEW]
    await until(lambda: engine.given["/sgl_ext/events"][-1] == NEW)
    async with client.get("/metrics") as answer:
        page = await answer.text()
    assert 'sgl_ext_file_reloads_total{file="engine_secret",result="applied"} 1.0' in page
    assert 'sgl_ext_file_reloads_total{file="engine_secret",result="refused"} 1.0' in page


async def test_an_engine_that_speaks_tls_is_refused_with_the_reason(start: Start) -> None:
    client = await start(Engine("a"))
    async with client.post("/sgl_ext/workers", json={"url": "https://e:1"}) as answer:
        assert answer.status == 400
        assert "plain HTTP to engines" in await answer.text()
