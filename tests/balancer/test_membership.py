"""A balancer that learns its engines from a file while it serves."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext.balancer import serve
from sgl_ext.balancer.admin import operations
from sgl_ext.membership import sources
from sgl_ext.membership.member import Member
from sgl_ext.membership.sources import write_members
from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import until

REQUEST = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "POLL_S", 0.01)


async def workers(client: ClientSession) -> dict[str, dict[str, Any]]:
    document = await (await client.get("/sgl_ext/workers")).json()
    return {row["id"]: row for row in document["workers"]}


async def until_listed(client: ClientSession, *ids: str) -> None:
    async def listed() -> bool:
        rows = await workers(client)
        return set(rows) == set(ids) and all(row["ready"] for row in rows.values())

    await until(listed)


async def test_an_engine_is_replaced_while_it_answers(start: Start, tmp_path: Path) -> None:
    asked, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.set()
        await finish.wait()
        return web.json_response({})

    listed = tmp_path / "engines.json"
    write_members(listed, ())
    engine = Engine("a", answer)
    client = await start(engine, workers=(), workers_from=(f"file:{listed}",))
    assert (await client.post("/v1/messages", json=REQUEST)).status == 529
    labels = {"node": "n1"}
    write_members(listed, (Member(id="one", url=engine.url, model="m", labels=labels),))
    await until_listed(client, "one")
    row = (await workers(client))["one"]
    assert (row["url"], row["model"], row["labels"]) == (engine.url, "m", labels)
    assert (row["source"], row["state"]) == (f"file:{listed}", "ready")

    answering = asyncio.create_task(client.post("/v1/messages", json=REQUEST))
    await asked.wait()
    write_members(listed, (Member(id="two", url=engine.url),))

    async def is_replaced() -> bool:
        return {name: row["state"] for name, row in (await workers(client)).items()} == {
            "one": "gone",
            "two": "ready",
        }

    await until(is_replaced)
    finish.set()
    assert (await answering).status == 200
    await until_listed(client, "two")
    assert (await client.post("/v1/messages", json=REQUEST)).status == 200
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_worker_ready{worker="two"} 1.0' in page
    assert 'worker="one"' not in page


class Subscribed(Engine):
    """Counts the streams of prefix events that are open."""

    open_streams = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_stream = request.path == "/sgl_ext/events"
        self.open_streams += is_stream
        try:
            return await super().handle(request)
        finally:
            self.open_streams -= is_stream


async def test_a_balancer_unsubscribes_from_an_engine_that_has_drained(
    start: Start, tmp_path: Path
) -> None:
    """So the engine knows when it may end."""
    asked, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.set()
        await finish.wait()
        return web.json_response({})

    listed = tmp_path / "engines.json"
    engine = Subscribed("a", answer)
    engine.events = [asyncio.Queue() for _ in range(9)]
    write_members(listed, ())
    client = await start(engine, workers=(), workers_from=(f"file:{listed}",))
    write_members(listed, (Member(id="one", url=engine.url),))
    await until_listed(client, "one")

    async def is_subscribed() -> bool:
        return engine.open_streams == 1

    await until(is_subscribed)
    answering = asyncio.create_task(client.post("/v1/messages", json=REQUEST))
    await asked.wait()
    write_members(listed, (Member(id="one", url=engine.url, state="draining"),))

    async def drains() -> bool:
        return bool((await workers(client))["one"]["state"] == "draining")

    await until(drains)
    assert await is_subscribed()
    finish.set()
    assert (await answering).status == 200

    async def is_left() -> bool:
        return engine.open_streams == 0

    await until(is_left)
    assert (await workers(client))["one"]["state"] == "draining"
    write_members(listed, (Member(id="one", url=engine.url),))
    await until(is_subscribed)


async def test_requests_wait_for_an_engine_that_restarts(start: Start, tmp_path: Path) -> None:
    """Its successor has the same URL and a new id, as the launcher lists it."""
    listed = tmp_path / "engines.json"
    engine = Engine("a")
    write_members(listed, ())
    client = await start(engine, workers=(), workers_from=(f"file:{listed}",))
    write_members(listed, (Member(id="one", url=engine.url),))
    await until_listed(client, "one")
    write_members(listed, (Member(id="one", url=engine.url, state="restarting"),))

    async def restarts() -> bool:
        return (await workers(client))["one"]["state"] == "restarting"

    async def waits() -> bool:
        page = await (await client.get("/metrics")).text()
        return "sgl_ext_queued_requests 1.0" in page

    await until(restarts)
    answering = asyncio.create_task(client.post("/v1/messages", json=REQUEST))
    await until(waits)
    assert (await client.get("/health")).status == 503
    write_members(listed, (Member(id="two", url=engine.url, state="restarting"),))
    await until_listed(client, "two")
    assert await waits()
    assert engine.seen == []
    write_members(listed, (Member(id="two", url=engine.url),))
    assert (await answering).status == 200


async def test_a_malformed_file_leaves_the_last_list_in_force(start: Start, tmp_path: Path) -> None:
    listed = tmp_path / "engines.json"
    write_members(listed, ())
    engine = Engine("a")
    client = await start(engine, workers=(), workers_from=(f"file:{listed}",))
    write_members(listed, (Member(id="one", url=engine.url),))
    await until_listed(client, "one")
    listed.write_text('{"workers": [{"id": 7, "url": "http://a:1"}]}')

    async def fault() -> str:
        document = await (await client.get("/sgl_ext/workers")).json()
        (source,) = document["sources"]
        return str(source["fault"])

    async def has_fault() -> bool:
        return await fault() != ""

    await until(has_fault)
    assert await fault() == (
        f"{listed}: is malformed: Expected `str`, got `int` - at `$.workers[0].id`"
    )
    assert (await client.post("/v1/messages", json=REQUEST)).status == 200
    listed.unlink()
    write_members(listed, (Member(id="two", url=engine.url),))
    await until_listed(client, "two")
    assert await fault() == ""


async def test_an_engine_that_the_admin_api_drains_by_id_stays_drained(
    start: Start, tmp_path: Path
) -> None:
    listed = tmp_path / "engines.json"
    write_members(listed, ())
    engine = Engine("a")
    client = await start(engine, workers=(), workers_from=(f"file:{listed}",))
    write_members(listed, (Member(id="one", url=engine.url),))
    await until_listed(client, "one")
    assert (await client.delete("/sgl_ext/workers", params={"id": "none"})).status == 404
    assert (await client.delete("/sgl_ext/workers", params={"id": "one"})).status == 202
    row = (await workers(client))["one"]
    assert (row["state"], row["draining"]) == ("drained", True)
    assert (await client.post("/v1/messages", json=REQUEST)).status == 529
    taken_back = await client.post("/sgl_ext/workers", json={"url": engine.url})
    assert (await taken_back.json())["id"] == "one"


async def test_an_engine_that_does_not_answer_is_not_added_unless_it_is_waited_for(
    start: Start,
) -> None:
    client = await start(Engine("a"))
    dead = {"url": "http://127.0.0.1:9"}
    answer = await client.post("/sgl_ext/workers", json={**dead, "wait": False})
    assert answer.status == 409
    message = (await answer.json())["error"]["message"]
    assert message.startswith("url: no engine answers at http://127.0.0.1:9 (")
    assert message.endswith("--wait")
    assert dead["url"] not in await workers(client)
    assert (await client.post("/sgl_ext/workers", json={**dead, "wait": True})).status == 201
    assert dead["url"] in await workers(client)


async def test_a_node_with_a_drained_engine_is_degraded_until_it_is_taken_back(
    start: Start,
) -> None:
    one, two = Engine("a"), Engine("b")
    client = await start(one, two)

    async def health() -> tuple[int, str]:
        answer = await client.get("/health")
        return answer.status, (await answer.json())["status"]

    assert await health() == (200, "ok")
    await client.delete(f"/sgl_ext/workers?url={one.url}")
    assert await health() == (200, "degraded")
    row = (await workers(client))[one.url]
    assert (row["state"], row["draining"]) == ("drained", True)
    state = await (await client.get("/sgl_ext/state")).json()
    assert (state["node"]["engines_ready"], state["node"]["engines_wanted"]) == (1, 2)
    assert [each["state"] for each in state["engines"]] == ["drained", "ready"]
    assert "sgl_ext_engines_ready 1.0" in await (await client.get("/metrics")).text()
    await client.post("/sgl_ext/workers", json={"url": one.url, "wait": False})
    assert await health() == (200, "ok")


async def test_the_admin_api_adds_a_bounded_number_of_workers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_ADDED", 2)
    client = await start()
    for port, status in ((1, 201), (2, 201), (3, 409), (2, 200)):
        answer = await client.post("/sgl_ext/workers", json={"url": f"http://127.0.0.1:{port}"})
        assert answer.status == status


def test_a_balancer_whose_source_cannot_be_read_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve, "write_logs", lambda *_: None)
    missing = f"file:{tmp_path / 'none.json'}"
    with pytest.raises(SystemExit) as ended:
        serve.main(["--workers-from", missing])
    assert str(ended.value) == (
        f"sgl-ext balancer: workers_from={missing!r}: {tmp_path / 'none.json'}: "
        "cannot be read: No such file or directory"
    )
