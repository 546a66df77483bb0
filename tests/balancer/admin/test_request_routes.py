"""What became of a request is found by its id, however it ended."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import ClientSession, web

from scheduler.placement import Placement, WorkerView
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.activity import Activity
from sgl_ext.balancer.reporting.request_log import (
    MOST_REMEMBERED,
    MOST_WORKERS,
    Course,
    End,
    EndedRequest,
    LineFile,
    Name,
    Outcome,
    RequestLog,
    as_line,
    ended_request,
)
from sgl_ext.balancer.routing.routing_request import NO_ROUTING
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.doctor.requests import Search
from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import until
from tests.balancer.workers import workers_at

CHAT = "/v1/chat/completions"
SECRET = "a word of the prompt"
SAID = {"messages": [{"role": "user", "content": SECRET}]}


async def post(client: ClientSession, request_id: str, body: Any = SAID, path: str = CHAT) -> int:
    answer = await client.post(path, json=body, headers={"x-request-id": request_id})
    await answer.read()
    return answer.status


async def fate(client: ClientSession, request_id: str) -> dict[str, Any]:
    async with client.get(f"/sgl_ext/requests/{request_id}") as answer:
        assert answer.status == 200
        text = await answer.text()
        assert SECRET not in text
        return dict(orjson.loads(text))


@pytest.fixture(params=["log", "memory"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"request_log": str(tmp_path / "log")} if request.param == "log" else {}


@pytest.mark.parametrize(
    ("status", "document", "kind"),
    [
        (
            400,
            {"error": {"type": "invalid_request_error", "message": SECRET}},
            "invalid_request_error",
        ),
        (422, {"object": "error", "type": "BadRequestError"}, "BadRequestError"),
        (500, {"error": {"type": SECRET}}, None),
        (404, {"detail": "Not Found"}, None),
        (400, {"error": SECRET}, None),
        (200, {"type": "message"}, None),
    ],
)
async def test_an_engine_s_error_has_its_type(
    start: Start, config: dict[str, Any], status: int, document: Any, kind: str | None
) -> None:
    async def fails(_: web.Request) -> web.StreamResponse:
        return web.json_response(document, status=status)

    client = await start(Engine("a", fails), **config)
    assert await post(client, "one") == status
    found = await fate(client, "one")
    assert (found["status"], found["error_type"]) == (status, kind)


async def test_a_rejected_request_has_the_type_that_its_client_got(
    start: Start, config: dict[str, Any]
) -> None:
    client = await start(**config)
    assert await post(client, "one", path="/v1/messages") == 529
    found = await fate(client, "one")
    assert (found["status"], found["error_type"]) == (529, "overloaded_error")


async def test_an_answered_request_has_the_scores_of_its_placement(
    start: Start, config: dict[str, Any]
) -> None:
    engines = [Engine("a"), Engine("b")]
    client = await start(*engines, **config)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "mine/1", "traceparent": parent}
    assert (await client.post(CHAT, json=SAID, headers=headers)).status == 200
    found = await fate(client, "mine/1")
    assert (found["id"], found["trace"]) == ("mine/1", parent.split("-")[1])
    assert (found["outcome"], found["status"], found["error"]) == ("complete", 200, None)
    assert found["reason"] == "new"
    assert {row["name"] for row in found["workers"]} == {engine.url for engine in engines}
    assert found["worker"] in [row["name"] for row in found["workers"] if not row["held_tokens"]]
    assert [row["cost"] for row in found["workers"]] == [3 * found["prompt_tokens"]] * 2
    await post(client, "next")
    assert (await fate(client, "next"))["reason"] == "home"
    assert len((await fate(client, "next"))["workers"]) == 2


async def test_the_latest_of_two_requests_with_one_id_is_found(
    start: Start, config: dict[str, Any]
) -> None:
    client = await start(Engine("a"), **config)
    assert await post(client, "x") == 200
    assert await post(client, "x", path="/v1/messages") == 200
    assert (await fate(client, "x"))["route"] == "/v1/messages"


async def test_rejected_requests_are_found(start: Start, config: dict[str, Any]) -> None:
    client = await start(**config)
    assert await post(client, "none", path="/v1/messages") == 529
    found = await fate(client, "none")
    assert (found["outcome"], found["status"]) == ("rejected", 529)
    assert (found["error"], found["worker"]) == ("No engine is ready.", None)
    assert await post(client, "wrong", {**SAID, "previous_response_id": SECRET}, "/v1/responses")
    found = await fate(client, "wrong")
    assert (found["outcome"], found["error"]) == ("rejected", None)


async def cut(request: web.Request) -> web.StreamResponse:
    if request.path == "/v1/messages":
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_failed_requests_and_cut_streams_are_found(
    start: Start, config: dict[str, Any]
) -> None:
    engine = Engine("a", cut)
    client = await start(engine, **config)
    assert await post(client, "failed") == 502
    found = await fate(client, "failed")
    assert (found["outcome"], found["status"]) == ("failed", 502)
    assert (found["worker"], found["attempts"]) == (engine.url, 2)
    assert found["error"].startswith("Engines failed 2 times")
    assert await post(client, "cut", path="/v1/messages") == 200
    found = await fate(client, "cut")
    assert (found["outcome"], found["status"]) == ("cut", 200)
    assert found["error"]


async def test_a_request_whose_client_left_is_found(start: Start, config: dict[str, Any]) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    client = await start(Engine("a", hang), **config)
    with pytest.raises(TimeoutError):
        await client.post(
            CHAT,
            json=SAID,
            headers={"x-request-id": "left"},
            timeout=aiohttp.ClientTimeout(total=0.2),
        )

    async def is_known() -> bool:
        return (await client.get("/sgl_ext/requests/left")).status == 200

    await until(is_known)
    found = await fate(client, "left")
    assert (found["outcome"], found["status"]) == ("disconnected", None)


async def test_unknown_ids_and_requests_without_a_route_are_not_found(
    start: Start, config: dict[str, Any]
) -> None:
    client = await start(Engine("a"), **config)
    assert await post(client, "lost", path="/v1/nothing") == 404
    for request_id in ("lost", "never", "a%20b", "x" * 200):
        answer = await client.get(f"/sgl_ext/requests/{request_id}")
        assert answer.status == 404
        assert (await answer.json())["error"]["message"] == "no request has this id"


async def test_a_written_line_is_found(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = await start(Engine("a"), request_log=str(log))
    await post(client, "x")

    async def written() -> bool:
        return bool(log.read_text())

    await until(written)
    assert log.read_text().startswith('{"id":"x",')
    assert await fate(client, "x") == orjson.loads(log.read_text())


def ended(request_id: str) -> EndedRequest:
    end = End(1.0, 200, Outcome.COMPLETE)
    name, course = Name(request_id, "0" * 32, CHAT), Course(0.0, 0.1, 0.2, 0)
    return ended_request(name, end, course, NO_ROUTING)


async def test_processes_find_each_others_requests_without_a_log(tmp_path: Path) -> None:
    logs = []
    for _ in range(2):
        metrics = Metrics()
        file = LineFile(tmp_path / "requests", 1 << 20, metrics)
        logs.append(RequestLog(metrics, Activity(0.0), None, shared=file))
    logs[0].keep(ended("x"))
    assert await logs[0].find("x") is not None
    assert await logs[1].find("x") is None
    for _ in range(2):
        await logs[0].write()
    logs[0].keep(ended("y"))
    await logs[0].write()
    for request_id in ("x", "y"):
        line = await logs[1].find(request_id)
        assert line is not None
        assert orjson.loads(line)["id"] == request_id
    assert len((tmp_path / "requests").read_text().splitlines()) == 2


async def test_without_a_log_the_latest_requests_are_remembered() -> None:
    log = RequestLog(Metrics(), Activity(0.0), None)
    for number in range(MOST_REMEMBERED + 1):
        log.keep(ended(f"{number}"))
    assert await log.find("0") is None
    assert await log.find("1") is not None


def test_of_many_workers_the_chosen_and_the_cheapest_are_kept() -> None:
    worker = workers_at(["http://a"], Metrics()).all[0]
    views = [WorkerView(f"w{number}", pending_tokens=number) for number in range(20)]
    views.append(WorkerView(worker.id, pending_tokens=99))
    attempt = Attempt(NO_ROUTING, worker, worker, Placement(worker.id, "moved"), views)
    name, end = Name("x", "0" * 32, CHAT), End(1.0, 200, Outcome.COMPLETE)
    kept = ended_request(name, end, Course(0.0, 0.1, 0.2, 1), NO_ROUTING, attempt)
    rows = orjson.loads(as_line(kept))["workers"]
    assert len(rows) == MOST_WORKERS
    assert [row["name"] for row in rows] == [*(f"w{n}" for n in range(7)), worker.id]


async def found(client: ClientSession, **query: str) -> dict[str, Any]:
    async with client.get("/sgl_ext/requests", params=query) as answer:
        text = await answer.text()
        assert (answer.status, SECRET not in text) == (200, True)
        return dict(orjson.loads(text))


async def test_requests_are_listed_at_once_and_say_what_took_their_time(
    start: Start, config: dict[str, Any]
) -> None:
    client = await start(Engine("a"), **config)
    for number in range(3):
        headers = {"x-request-id": f"r{number}", "x-session-id": f"s{number % 2}"}
        assert (await client.post(CHAT, json=SAID, headers=headers)).status == 200
    everything = await found(client)
    assert [row["id"] for row in everything["requests"]] == ["r2", "r1", "r0"]
    assert everything["groups"] == []
    (row,) = (await found(client, session="s1"))["requests"]
    assert row["id"] == "r1"
    assert row["sentence"].startswith("waited 0 ms in the queue and 0 ms behind a prefill; ")


async def test_who_was_refused_is_listed_with_the_reason(
    start: Start, config: dict[str, Any]
) -> None:
    client = await start(**config)
    assert await post(client, "none", path="/v1/messages") == 529
    refused = await found(client, status="refused", since="300")
    assert refused["requests"][0]["sentence"].endswith(": No engine is ready")
    assert refused["groups"] == [
        {"tenant": "", "status": 529, "outcome": "rejected", "error": "No engine is ready."}
        | {"requests": 1}
    ]
    assert (await found(client, status="200"))["requests"] == []


@pytest.mark.parametrize(
    "query", ["status=sometimes", "status=600", "since=soon", "limit=1e3", "after=" + "9" * 30]
)
async def test_a_wrong_search_is_refused_by_name(start: Start, query: str) -> None:
    client = await start(Engine("a"))
    answer = await client.get(f"/sgl_ext/requests?{query}")
    assert answer.status == 400
    name = query.partition("=")[0]
    assert (await answer.json())["error"]["message"].startswith(f"{name}: must be ")


async def test_a_list_of_several_processes_has_each_request_once(tmp_path: Path) -> None:
    logs = []
    for _ in range(2):
        file = LineFile(tmp_path / "requests", 1 << 20, Metrics())
        logs.append(RequestLog(Metrics(), Activity(0.0), None, shared=file))
    for number, log in enumerate(logs):
        log.keep(ended(f"{number}"))
        await log.write()
        log.keep(ended(f"more {number}"))
    names = [row["id"] for row in (await logs[0].search(Search()))["requests"]]
    assert sorted(names) == ["0", "1", "more 0"]


async def test_off_is_no_log(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = await start(Engine("a"), request_log="off")
    assert await post(client, "x") == 200
    assert (await fate(client, "x"))["id"] == "x"
    assert os.listdir() == []


async def test_what_is_being_written_is_listed_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "requests", 1 << 20, Metrics())
    log = RequestLog(Metrics(), Activity(0.0), file)
    log.keep(ended("x"))
    file.append(file.waiting)  # as a write that has not returned yet
    assert [row["id"] for row in (await log.search(Search()))["requests"]] == ["x"]
