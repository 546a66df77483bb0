"""An engine with data-parallel ranks: each rank is a worker of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain
from tests.balancer.admin.test_state import LOAD, PIN, repeated
from tests.balancer.conftest import Engine, Start
from tests.balancer.workers import workers_at

PATH = "/v1/chat/completions"
FIRST = {"snapshot": True, "cleared": True, "publishes": ["prefixes", "load"], "load": LOAD}


def body(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text * 400}]}


class Ranked(Engine):
    """An engine of several ranks. told: what each rank publishes beside its first line."""

    def __init__(self, ranks: int = 2, told: dict[int, dict[str, Any]] | None = None) -> None:
        super().__init__("ranked")
        self.ranks = ranks
        self.told = told or {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response(headers={"x-sgl-ext-ranks": str(self.ranks)})
        if request.path == "/sgl_ext/events":
            rank = int(request.query.get("rank", "0"))
            response = web.StreamResponse()
            await response.prepare(request)
            lines = FIRST | self.told.get(rank, {}), {"complete": True}
            for number, line in enumerate(lines):
                await response.write(orjson.dumps({"seq": number, **line}) + b"\n")
            await asyncio.Event().wait()  # until the reader leaves
        return await super().handle(request)

    @property
    def ranks_asked(self) -> list[str]:
        return [h["x-sgl-ext-rank"] for path, _, h in self.seen if path == PATH]


async def workers_of(
    client: ClientSession, is_wanted: Callable[[list[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    async def shown() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await (await client.get("/sgl_ext/workers")).json())[
            "workers"
        ]
        return found

    ask: Callable[[], Awaitable[list[dict[str, Any]]]] = shown
    return await repeated(ask, is_wanted)


def all_publish(rows: list[dict[str, Any]]) -> bool:
    return all(row["publishes_prefixes"] and row["ready"] for row in rows)


async def test_each_rank_is_a_worker(start: Start) -> None:
    engine = Ranked()
    client = await start(engine)
    rows = await workers_of(client, lambda rows: len(rows) == 2 and all_publish(rows))
    assert [(row["id"], row["rank"]) for row in rows] == [(engine.url, 0), (f"{engine.url}#1", 1)]
    assert {row["url"] for row in rows} == {engine.url}


async def test_a_request_goes_to_the_rank_that_holds_its_prefix(start: Start) -> None:
    sent = body("warm ")
    chain = read_chain(of_path(PATH), sent)
    names = [None, *(f"{segment:032x}" for segment in chain.hashes)]
    stored = [[name, names[k], 100 * (k + 5)] for k, name in enumerate(names[1:])]
    engine = Ranked(3, {2: {"stored": stored}})
    client = await start(engine)
    await workers_of(client, lambda rows: len(rows) == 3 and all_publish(rows))
    await client.post(PATH, json=sent, headers={"x-sgl-ext-rank": "1"})
    assert engine.ranks_asked == ["2"]


async def test_a_conversation_stays_on_its_rank(start: Start) -> None:
    engine = Ranked()
    client = await start(engine)
    await workers_of(client, lambda rows: len(rows) == 2 and all_publish(rows))
    for _ in range(3):
        for session in ("a", "b"):
            await client.post(PATH, json=body(session), headers={"x-session-id": session})
    a, b = engine.ranks_asked[::2], engine.ranks_asked[1::2]
    assert len(set(a)) == len(set(b)) == 1
    assert a != b, "the load is spread over the ranks"


async def test_a_pin_tells_its_rank_and_is_deleted_there(start: Start) -> None:
    engine = Ranked(told={1: {"pinned": [PIN]}})
    client = await start(engine)
    await workers_of(client, lambda rows: len(rows) == 2 and all_publish(rows))
    (pin,) = (await (await client.get("/v1/pins")).json())["pins"]
    assert (pin["worker"], pin["rank"]) == (f"{engine.url}#1", 1)
    await client.delete("/v1/pins", params={"prefix": PIN["prefix"], "worker": pin["worker"]})
    await client.delete("/v1/pins", params={"prefix": PIN["prefix"]})
    first, second = (h for path, _, h in engine.seen if path.startswith("/v1/pins"))
    assert first["x-sgl-ext-rank"] == "1"
    assert "x-sgl-ext-rank" not in second, "sent once, to the engine as a whole"


async def test_a_rank_drains_with_its_engine(start: Start) -> None:
    engine = Ranked()
    client = await start(engine)
    await workers_of(client, lambda rows: len(rows) == 2 and all_publish(rows))
    answer = await client.delete("/sgl_ext/workers", params={"id": f"{engine.url}#1"})
    assert answer.status == 202
    await workers_of(client, lambda rows: [row["state"] for row in rows] == ["drained"] * 2)


async def test_an_engine_that_comes_back_with_fewer_ranks_loses_the_others(start: Start) -> None:
    engine = Ranked(3)
    client = await start(engine)
    await workers_of(client, lambda rows: len(rows) == 3)
    engine.ranks = 1
    assert len(await workers_of(client, lambda rows: len(rows) == 1)) == 1


async def test_a_rank_that_hangs_is_tried_itself() -> None:
    engine = Ranked()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    async with TestServer(app) as engine.server, ClientSession() as session:
        workers = workers_at([engine.url], Metrics())
        probes = WorkerProbes(workers, session, lambda *_: None)
        await probes.probe(workers.all[0])
        first, second = workers.all
        second.is_hung = True
        await probes.probe(second)
        assert second.ready
        assert not second.is_hung
    ((path, data, headers),) = engine.seen
    assert (path, headers["x-sgl-ext-rank"]) == ("/generate", "1")
    assert orjson.loads(data)["sampling_params"] == {"max_new_tokens": 1}
    assert first.ready
