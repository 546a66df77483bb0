"""The state document, once and as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import ClientSession, web

from sgl_ext import keys
from sgl_ext.balancer.admin import state as state_module
from sgl_ext.balancer.admin.state import MOST_STREAMS
from sgl_ext.balancer.cluster.launcher import Launcher
from sgl_ext.doctor.__main__ import main as doctor
from tests.balancer.conftest import Connect, Engine, Serve, Start
from tests.balancer.wire import Raw, connected
from tests.waiting import HANG_S

HEX = "0123456789abcdef" * 2
LOAD = {
    "running": 3,
    "queued": 2,
    "pending_tokens": 500,
    "used_tokens": 40_000,
    "pinned_tokens": 12_000,
    "capacity_tokens": 100_000,
    "max_running": 64,
}
PIN = {
    "prefix": HEX,
    "segment": None,
    "tokens": 12_000,
    "ttl_s": 3600.0,
    "left_s": 1800.0,
    "hits": 4,
    "owner": "alice",
    "session": "s1",
}
USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 900},
}


def reporting(*lines: dict[str, Any]) -> Engine:
    """An engine that reports this, and answers every chat with USAGE."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"usage": USAGE})

    engine = Engine("a", answer, "tiny")
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    for number, line in enumerate(lines):
        queue.put_nowait(json.dumps({"seq": number, **line}).encode() + b"\n")
    engine.events.append(queue)
    return engine


async def state(client: ClientSession) -> dict[str, Any]:
    answer = await client.get("/sgl_ext/state")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = await answer.json()
    return found


T = TypeVar("T")


async def repeated(ask: Callable[[], Awaitable[T]], is_wanted: Callable[[T], object]) -> T:
    """The first answer that is wanted."""
    async with asyncio.timeout(HANG_S):
        while not is_wanted(answer := await ask()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    return answer


async def state_with(
    client: ClientSession, is_wanted: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    return await repeated(lambda: state(client), is_wanted)


async def chat(client: ClientSession, **headers: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    await (await client.post("/v1/chat/completions", json=body, headers=headers)).read()


async def test_it_has_what_engines_report(start: Start) -> None:
    client = await start(
        reporting({"snapshot": True, "publishes": ["prefixes"], "load": LOAD, "pinned": [PIN]})
    )
    found = await state_with(client, lambda state: state["pins"])
    (engine,) = found["engines"]
    assert engine["state"] == "ready"
    assert (engine["running"], engine["waiting"], engine["in_flight"]) == (3, 2, 0)
    assert engine["kv"] == {
        "used_tokens": 40_000,
        "pinned_tokens": 12_000,
        "free_tokens": 60_000,
        "total_tokens": 100_000,
    }
    (pin,) = found["pins"]
    assert pin["worker"] == engine["id"]
    assert 1700 < pin["left_s"] <= 1800
    assert found["node"]["status"] == "ok"
    assert found["node"]["model"] == "tiny"
    assert found["queue"] == {"limit": 1024, "waiting": 0, "by_priority": []}
    assert found["divergences"] == []


async def test_it_has_what_was_answered(start: Start) -> None:
    client = await start(reporting({"snapshot": True}))
    for _ in range(2):
        await chat(client, **{"x-session-id": "s", "x-tenant-id": "<img src=x>"})
    found = await state_with(client, lambda state: state["sessions"][0]["turns"] == 2)
    (session,) = found["sessions"]
    assert (session["turns"], session["cached_share"], session["tenant"]) == (2, 0.9, "<img src=x>")
    assert found["counts"]["sessions"] == 1
    assert found["engines"][0]["hit_rate"] == 0.9
    (tenant,) = found["tenants"]
    assert tenant == {
        "name": "<img src=x>",
        "requests": 2,
        "prompt_tokens": 2000,
        "cached_share": 0.9,
        "limits": None,
    }


async def test_it_names_the_caches_that_an_engine_turned_off(start: Start) -> None:
    client = await start(reporting({"snapshot": True, "caches_off": ["messages"]}))
    found = await state_with(client, lambda state: bool(state["engines"][0]["note"]))
    assert found["engines"][0]["note"].endswith("caches off: messages")


async def test_it_names_the_features_with_which_an_engine_does_less(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await start(reporting({"snapshot": True, "degraded": ["HiCache", "FlexKV"]}))
    found = await state_with(client, lambda state: bool(state["engines"][0]["note"]))
    assert found["engines"][0]["note"].endswith("with less: HiCache, FlexKV (docs/guide/models.md)")
    assert await asyncio.to_thread(doctor, ["--url", str(client._base_url)]) == 0
    name = found["engines"][0]["id"]
    less = f"{name} serves with less: HiCache, FlexKV (docs/guide/models.md)\n"
    assert capsys.readouterr().out.startswith(less)


async def test_what_is_not_known_is_null(start: Start) -> None:
    client = await start(Engine("a"))
    found = await state(client)
    (engine,) = found["engines"]
    unknown = ("running", "waiting", "kv", "hit_rate", "stage", "progress", "fault")
    assert {engine[key] for key in unknown} == {None}
    assert found["node"]["model"] is None
    assert found["history"]["hit_rate"] == []


async def test_an_engine_that_was_never_ready_is_starting(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    await client.post("/sgl_ext/workers", json={"url": "http://127.0.0.1:9"})
    assert [each["state"] for each in (await state(client))["engines"]] == ["ready", "starting"]
    assert engine.server is not None
    await engine.server.close()
    found = await state_with(client, lambda state: state["engines"][0]["state"] == "unreachable")
    assert found["node"]["status"] == "no engine is ready"


async def test_a_launcher_tells_how_far_an_engine_has_come(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine("a")
    client = await start(engine)
    url, server = engine.url, engine.server

    async def children(_: Launcher) -> list[dict[str, Any]]:
        loading = {"state": "starting", "stage": "loading weights", "progress": 0.4}
        return [{"name": "engine-0", "url": url, **loading}, {"name": "balancer"}]

    monkeypatch.setattr(Launcher, "children", children)
    (found,) = (await state(client))["engines"]
    assert (found["state"], found["stage"], found["progress"]) == ("ready", None, None)
    assert server is not None
    await server.close()
    found = await state_with(client, lambda state: state["engines"][0]["state"] == "starting")
    assert found["engines"][0]["stage"] == "loading weights"
    assert found["engines"][0]["progress"] == 0.4


async def test_tenants_have_their_limits(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[tenants.idle]\ntokens_per_minute = 5000\n[tenants.boss]\nadmin = true\n")
    key, _ = keys.add_key(file, "boss")
    client = await start(Engine("a"), keys=str(file))
    assert (await client.get("/sgl_ext/state")).status == 401
    client.headers["authorization"] = f"Bearer {key}"
    found = await state(client)
    limits = {row["name"]: row["limits"] for row in found["tenants"]}
    assert limits["idle"]["tokens_per_minute"] == 5000
    assert limits["boss"]["tokens_per_minute"] is None


async def events(client: ClientSession, count: int) -> list[dict[str, Any]]:
    answer = await client.get("/sgl_ext/live")
    assert answer.content_type == "text/event-stream"
    found = []
    while len(found) < count:
        assert await answer.content.readline() == b"event: state\n"
        line = await answer.content.readline()
        found.append(json.loads(line.removeprefix(b"data: ")))
        assert await answer.content.readline() == b"\n"
    answer.close()
    return found


async def test_the_stream_repeats_the_document(start: Start) -> None:
    client = await start(Engine("a"))
    first, second = await events(client, 2)
    assert first.keys() == second.keys() == (await state(client)).keys()
    assert first["node"]["now_s"] < second["node"]["now_s"]


async def test_streams_are_few(start: Start) -> None:
    client = await start(Engine("a"))
    streams = [await client.get("/sgl_ext/live") for _ in range(MOST_STREAMS)]
    refused = await client.get("/sgl_ext/live")
    assert refused.status == 503
    assert "16 live streams" in await refused.text()
    streams.pop().close()
    answer = await repeated(
        lambda: client.get("/sgl_ext/live"), lambda answer: answer.status == 200
    )
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_live_streams_dropped_total{reason="many"}' in page
    for each in (*streams, answer):
        each.close()


async def test_a_stream_whose_client_does_not_read_is_dropped(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "_SLOW_S", 0.05)
    monkeypatch.setattr(state_module.States, "latest", _large)
    balancer = await serve(Raw(), interval_s=0.001)
    wire = await connect(balancer)
    wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
    wire.writer.write(b"GET /sgl_ext/live HTTP/1.1\r\n\r\n")
    async with connected(balancer) as other:
        page = b""
        while b'sgl_ext_live_streams_dropped_total{reason="slow"} 1.0' not in page:
            _, page = await other.ask(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"sgl_ext_live_streams 0.0" in page


async def _large(_: state_module.States) -> bytes:
    return b"0" * 100_000


async def test_a_drain_is_told_and_does_not_wait_for_a_stream(
    serve: Serve, connect: Connect
) -> None:
    balancer = await serve(Raw(), drain_s=60, interval_s=0.01)
    wire = await connect(balancer)
    wire.writer.write(b"GET /sgl_ext/live HTTP/1.1\r\n\r\n")
    await wire.reader.readuntil(b'"status":"ok"')
    async with asyncio.timeout(HANG_S):
        await balancer.stop()
    assert b'"status":"draining"' in await wire.rest()


async def test_sessions_have_their_ttft_and_errors_and_can_be_searched_and_sorted(
    start: Start,
) -> None:
    client = await start(Engine("a"))
    for number in range(3):
        headers = {"x-session-id": f"s{number}", "x-tenant-id": "alice"}
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
    async with client.get("/sgl_ext/sessions?search=alice s1&sort=ttft") as answer:
        found = await answer.json()
    assert (found["count"], found["of"], found["sessions"][0]["id"]) == (1, 3, "s1")
    assert found["sessions"][0]["ttft_s"] > 0
    assert (await client.get("/sgl_ext/sessions?sort=luck")).status == 400


async def test_what_the_balancer_refuses_counts_as_its_session_s_error(start: Start) -> None:
    client = await start()
    headers = {"x-session-id": "s1"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(2):
        async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 503
    async with client.get("/sgl_ext/sessions?sort=errors") as answer:
        (session,) = (await answer.json())["sessions"]
    assert (session["id"], session["turns"], session["errors"]) == ("s1", 0, 2)
    assert (session["ttft_s"], session["cached_share"]) == (None, None)
