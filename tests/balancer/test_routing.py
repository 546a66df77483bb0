"""Routing over HTTP: requests follow the prefix events, and clients do not see failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sized
from itertools import count
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, ClientTimeout, web

from scheduler import silence, suspects
from sgl_ext.balancer.routing import worker_probes
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain
from tests.balancer.conftest import Engine, Start
from tests.waiting import HANG_S

CHAT = "/v1/chat/completions"
HARNESS = "You are a coding agent. " * 800


def body(*texts: str, system: str = HARNESS) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "m", "messages": [{"role": "system", "content": system}, *turns]}


def event(seq: int, request: dict[str, Any] | None = None, path: str = CHAT, **more: Any) -> bytes:
    """A line of an engine's events: it holds all of a request."""
    stored, parent = [], None
    for segment in read_chain(of_path(path), request or {}).hashes:
        stored.append([f"{segment:032x}", parent, 5000])
        parent = f"{segment:032x}"
    if "snapshot" in more:
        more["publishes"] = ["prefixes", "load"]
    return orjson.dumps({"seq": seq, "stored": stored, **more}) + b"\n"


def snapshot(seq: int = 1, request: dict[str, Any] | None = None) -> bytes:
    return event(seq, request, snapshot=True, cleared=True, publishes=["prefixes", "load"])


async def explained(client: ClientSession, request: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/sgl_ext/explain" + CHAT, json=request)
    assert answer.status == 200
    document: dict[str, Any] = await answer.json()
    return document


async def until_held(client: ClientSession, engine: Engine, request: Any, tokens: int) -> None:
    """Waits until the balancer knows that the engine holds so much of a request."""

    async def held() -> bool:
        rows = (await explained(client, request))["workers"]
        return {row["name"]: row["held_tokens"] for row in rows}.get(engine.url) == tokens

    await until(held)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Returns once something is so; fails if it is not in time."""
    async with asyncio.timeout(HANG_S):
        while not await true():  # noqa: ASYNC110 - what is waited for happens in a server
            await asyncio.sleep(0.01)


async def until_count(of: Sized, count: int) -> None:
    """Returns once so many requests have reached their engine."""

    async def reached() -> bool:
        return len(of) == count

    await until(reached)


async def until_queued(client: ClientSession, count: int) -> None:
    """Returns once so many requests are in the balancer's admission queue."""

    async def queued() -> bool:
        page = await (await client.get("/metrics")).text()
        return f"\nsgl_ext_queued_requests {count}.0" in page

    await until(queued)


async def is_drained(client: ClientSession, engine: Engine) -> bool:
    document = await (await client.get("/sgl_ext/workers")).json()
    return ("drained", engine.url) in [(w["state"], w["url"]) for w in document["workers"]]


async def served_by(client: ClientSession, request: dict[str, Any], **options: Any) -> str:
    answer = await client.post(CHAT, json=request, **options)
    assert answer.status == 200, await answer.text()
    name: str = (await answer.json())["engine"]
    return name


def held_back(gate: asyncio.Event) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """An engine's answers, none of them before the gate opens."""

    async def answer(_: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.json_response({"engine": "a"})

    return answer


def telling(name: str, *connections: list[bytes]) -> Engine:
    """An engine that tells its prefix events, on each connection of the balancer in turn."""
    engine = Engine(name)
    for lines in connections:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        for line in lines:
            queue.put_nowait(line)
        engine.events.append(queue)
    return engine


async def test_a_request_goes_where_an_engine_says_it_holds_the_prefix(start: Start) -> None:
    quiet, holder = telling("quiet", [snapshot()]), telling("holder", [snapshot(1, body("Hello"))])
    client = await start(quiet, holder)
    await until_held(client, holder, body("Hello"), 5000)
    for number in range(4):
        assert await served_by(client, body("Hello", "Hi.", f"Go {number}")) == "holder"


@pytest.mark.parametrize("shared", [5000, 1500])
async def test_a_batch_goes_where_most_of_its_longest_prompt_is(start: Start, shared: int) -> None:
    path, prompt = "/v1/completions", "a" * 5000
    held = event(
        1, {"model": "m", "prompt": prompt[:shared] + "b"}, path, snapshot=True, cleared=True
    )
    quiet, holder = telling("quiet", [snapshot()]), telling("holder", [held])
    client = await start(quiet, holder)
    batch = {"model": "m", "prompt": [prompt[:40], prompt, prompt[:900]]}

    async def found() -> dict[str, Any]:
        answer = await client.post(f"/sgl_ext/explain{path}", json=batch)
        document: dict[str, Any] = await answer.json()
        return document

    async def is_held() -> bool:
        rows = {row["name"]: row["held_tokens"] for row in (await found())["workers"]}
        return rows.get(holder.url, 0) > 0

    await until(is_held)
    assert (await found())["segments"] > 0
    for _ in range(4):
        answer = await client.post(path, json=batch)
        assert (answer.status, (await answer.json())["engine"]) == (200, "holder")


async def test_an_eviction_is_followed(start: Start) -> None:
    holder = telling("holder", [snapshot(1, body("Hello"))])
    client = await start(holder, telling("quiet", [snapshot()]))
    await until_held(client, holder, body("Hello"), 5000)
    first = f"{read_chain(of_path(CHAT), body('Hello')).hashes[0]:032x}"
    holder.events[0].put_nowait(event(2, removed=[first]))
    await until_held(client, holder, body("Hello"), 0)


async def test_a_gap_in_the_events_is_healed_by_a_snapshot(start: Start) -> None:
    gap = [snapshot(1), event(3, body("Lost"))]
    engine = telling("a", gap, [snapshot(9, body("Hello"))])
    client = await start(engine)
    await until_held(client, engine, body("Hello"), 5000)
    page = await (await client.get("/metrics")).text()
    assert f'sgl_ext_prefix_event_faults_total{{fault="gap",worker="{engine.url}"}} 1.0' in page


async def test_malformed_events_are_counted_and_the_balancer_goes_on(start: Start) -> None:
    good = [snapshot(1, body("Hello"))]
    engine = telling("a", [b'{"seq": "x"}\n'], [b"\x00\xff\n"], good)
    client = await start(engine)
    await until_held(client, engine, body("Hello"), 5000)
    assert await served_by(client, body("Hello")) == "a"


async def test_the_explanation_names_each_worker_s_cost(start: Start) -> None:
    holder, quiet = telling("holder", [snapshot(1, body("Hello"))]), telling("quiet", [snapshot()])
    client = await start(holder, quiet)
    await until_held(client, holder, body("Hello"), 5000)
    found = await explained(client, body("Hello", "Hi.", "Go on"))
    assert (found["worker"], found["home"], found["reason"]) == (holder.url, holder.url, "home")
    costs = {row["name"]: row["cost"] for row in found["workers"]}
    assert costs[holder.url] < costs[quiet.url]
    assert holder.seen == quiet.seen == [], "explaining sends nothing"


async def test_pins_are_shown_with_their_engine_and_forgotten_with_it(start: Start) -> None:
    segment = f"{read_chain(of_path(CHAT), body('Hello')).hashes[-1]:032x}"
    row = {"prefix": "a" * 32, "segment": segment, "tokens": 5000, "left_s": 60.0, "session": "s"}
    engine = telling("a", [event(1, body("Hello"), snapshot=True, cleared=True, pinned=[row])])
    other = telling("b", [snapshot()])
    client = await start(engine, other)
    await until_held(client, engine, body("Hello"), 5000)
    (shown,) = (await (await client.get("/v1/pins")).json())["pins"]
    assert (shown["prefix"], shown["worker"], shown["session"]) == ("a" * 32, engine.url, "s")
    assert 0 < shown["left_s"] <= 60
    rows = (await explained(client, body("Hello", "Hi.", "Go on")))["workers"]
    assert {r["name"]: r["pinned_tokens"] for r in rows} == {engine.url: 5000, other.url: 0}
    await client.delete("/sgl_ext/workers", params={"url": engine.url})

    async def shows_none() -> bool:
        return (await (await client.get("/v1/pins")).json())["pins"] == []

    await until(shows_none)


async def test_only_placed_paths_can_be_explained(start: Start) -> None:
    client = await start(Engine("a"))
    assert (await client.post("/sgl_ext/explain/v1/models", json={})).status == 404
    assert (
        await client.post(
            "/sgl_ext/explain" + CHAT, data=b"{", headers={"content-type": "application/json"}
        )
    ).status == 400


@pytest.mark.parametrize("raw", [b"[]", b"7", b'{"messages": 5}', b'{"messages": [[], null, 3]}'])
async def test_a_body_of_unknown_structure_is_left_to_the_engine(start: Start, raw: bytes) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "engine says no"}, status=400)

    client = await start(Engine("a", refuse), Engine("b", refuse))
    answer = await client.post(CHAT, data=raw, headers={"content-type": "application/json"})
    assert (answer.status, await answer.json()) == (400, {"error": "engine says no"})


async def test_workers_join_and_leave_at_run_time(start: Start) -> None:
    one, two = Engine("one"), Engine("two")
    client = await start(one, two)
    assert (await client.delete("/sgl_ext/workers", params={"url": one.url})).status == 202
    assert {await served_by(client, body(f"Task {n}")) for n in range(6)} == {"two"}
    await until(lambda: is_drained(client, one))
    assert (await client.post("/sgl_ext/workers", json={"url": one.url})).status == 200
    assert (await client.delete("/sgl_ext/workers", params={"url": two.url})).status == 202
    await until(lambda: is_drained(client, two))
    assert await served_by(client, body("Task")) == "one"


@pytest.mark.parametrize(
    "url", [None, 5, "", "ftp://a", "http://", "http://a:x", "http://a/path", "http://u@a"]
)
async def test_a_worker_s_url_is_checked(start: Start, url: Any) -> None:
    client = await start(Engine("a"))
    answer = await client.post("/sgl_ext/workers", json={"url": url})
    assert answer.status == 400
    assert "url" in (await answer.json())["error"]["message"]


async def test_a_balancer_whose_last_worker_drains_is_not_healthy(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    assert (await client.get("/health")).status == 200
    await client.delete("/sgl_ext/workers", params={"url": engine.url})
    assert (await client.get("/health")).status == 503
    assert (await client.post(CHAT, json=body("Hello"))).status == 503


async def test_an_unknown_worker_cannot_be_drained(start: Start) -> None:
    client = await start(Engine("a"))
    answer = await client.delete("/sgl_ext/workers", params={"url": "http://nobody"})
    assert answer.status == 404


async def test_requests_wait_for_capacity_and_are_served_in_order(start: Start) -> None:
    gate = asyncio.Event()
    order: list[str] = []

    async def slow(request: web.Request) -> web.StreamResponse:
        order.append((await request.json())["messages"][1]["content"])
        await gate.wait()
        return web.json_response({"engine": "a"})

    client = await start(Engine("a", slow), max_in_flight=1)
    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(served_by(client, body(f"{number}"))))
        await until_count(order, 1)
        await until_queued(client, number)
    assert order == ["0"]
    gate.set()
    assert await asyncio.gather(*waiting) == ["a"] * 4
    assert order == ["0", "1", "2", "3"]


async def test_a_full_queue_rejects_with_retry_after(start: Start) -> None:
    gate = asyncio.Event()

    client = await start(Engine("a", held_back(gate)), max_in_flight=1, queue_limit=1)
    tasks = [asyncio.create_task(served_by(client, body(f"{n}"))) for n in range(2)]
    await until_queued(client, 1)
    answer = await client.post("/v1/messages", json=body("third"))
    assert (answer.status, answer.headers["retry-after"]) == (529, "5")
    assert (await answer.json())["error"]["type"] == "overloaded_error"
    gate.set()
    assert await asyncio.gather(*tasks) == ["a", "a"]


async def test_more_important_requests_are_placed_first(start: Start) -> None:
    gate, order = asyncio.Event(), []

    async def slow(request: web.Request) -> web.StreamResponse:
        order.append((await request.json())["messages"][1]["content"])
        await gate.wait()
        return web.json_response({"engine": "a"})

    client = await start(Engine("a", slow), max_in_flight=1)
    waiting = [asyncio.create_task(served_by(client, body("first")))]
    await until_count(order, 1)
    others = (("usual", "0"), ("batch", "-5"), ("person", "10"), ("another", "0"))
    for number, (name, priority) in enumerate(others):
        headers = {"x-sgl-ext-priority": priority}
        waiting.append(asyncio.create_task(served_by(client, body(name), headers=headers)))
        await until_queued(client, number + 1)
    gate.set()
    await asyncio.gather(*waiting)
    assert order[:2] == ["first", "person"]
    assert sorted(order[2:4]) == ["another", "usual"]
    assert order[4] == "batch"


async def test_a_full_queue_rejects_the_least_important(start: Start) -> None:
    gate = asyncio.Event()

    engine = Engine("a", held_back(gate))
    client = await start(engine, max_in_flight=1, queue_limit=1)
    first = asyncio.create_task(served_by(client, body("first")))
    await until_count(engine.seen, 1)
    usual = asyncio.create_task(client.post(CHAT, json=body("usual")))
    await until_queued(client, 1)
    headers = {"x-sgl-ext-priority": "10"}
    person = asyncio.create_task(served_by(client, body("person"), headers=headers))
    assert (await usual).status == 503
    gate.set()
    assert await asyncio.gather(first, person) == ["a", "a"]


async def test_a_request_that_waits_too_long_is_rejected(start: Start) -> None:
    gate = asyncio.Event()

    engine = Engine("a", held_back(gate))
    client = await start(engine, max_in_flight=1, queue_timeout_s=0.1)
    first = asyncio.create_task(served_by(client, body("first")))
    await until_count(engine.seen, 1)
    answer = await client.post(CHAT, json=body("second"))
    assert answer.status == 503
    gate.set()
    assert await first == "a"


async def test_a_request_whose_client_disconnects_is_not_sent(start: Start) -> None:
    gate = asyncio.Event()
    engine = Engine("a", held_back(gate))
    client = await start(engine, max_in_flight=1)
    first = asyncio.create_task(served_by(client, body("first")))
    await until_count(engine.seen, 1)
    impatient = asyncio.create_task(client.post(CHAT, json=body("second")))
    await until_queued(client, 1)
    impatient.cancel()
    await until_queued(client, 0)
    gate.set()
    assert await first == "a"
    assert await served_by(client, body("third")) == "a"
    assert len(engine.seen) == 2


def loaded(seq: int, queued: int, **more: Any) -> bytes:
    """An engine that runs one request at a time says how many wait there."""
    load = {"capacity_tokens": 100_000, "max_running": 1, "queued": queued}
    return event(seq, load=load, **more)


async def shown(client: ClientSession, line: str) -> bool:
    return line in (await (await client.get("/metrics")).text()).splitlines()


async def test_requests_wait_and_go_on_by_an_engines_report(start: Start) -> None:
    engine = telling("a", [loaded(1, 5, snapshot=True, cleared=True)])
    client = await start(engine, interval_s=60)
    headers = {"x-sgl-ext-priority": "3"}
    task = asyncio.create_task(served_by(client, body("Hello"), headers=headers))
    await until(lambda: shown(client, "sgl_ext_queued_requests 1.0"))
    assert (await client.post("/v1/messages/count_tokens", json=body("Hello"))).status == 200
    assert (await client.get("/v1/models")).status == 200
    paths = [path for path, _, _ in engine.seen]
    assert paths == ["/v1/messages/count_tokens", "/v1/models"], "they need no room"
    engine.events[0].put_nowait(loaded(2, 0))
    assert await task == "a"
    for name in ("queue", "ttft"):
        line = f'sgl_ext_priority_{name}_seconds_count{{priority="1"}} 1.0'
        assert await shown(client, line)


async def test_a_report_outlives_one_broken_connection(start: Start) -> None:
    full, broken = loaded(1, 5, snapshot=True, cleared=True), b"broken\n"
    engine = telling("a", [full, broken], [full, broken], [broken], [])
    client = await start(engine, interval_s=60)
    task = asyncio.create_task(served_by(client, body("Hello")))

    async def faults(count: int) -> bool:
        name = "sgl_ext_prefix_event_faults_total"
        line = f'{name}{{fault="malformed",worker="{engine.url}"}} {float(count)}'
        return await shown(client, line)

    await until(lambda: faults(2))
    assert await shown(client, "sgl_ext_queued_requests 1.0")
    await until(lambda: faults(3))
    assert await task == "a"


async def test_sub_agents_wait_for_the_prefix_that_the_first_one_computes(start: Start) -> None:
    gate, seen = asyncio.Event(), []

    async def slow(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["messages"][1]["content"])
        await gate.wait()
        return web.json_response({"engine": "?"})

    engines = [telling("a", [snapshot()]), telling("b", [snapshot()])]
    for engine in engines:
        engine.answer = slow
    client = await start(*engines)
    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(served_by(client, body(f"Find {number}"))))
        await until_count(seen, 1)
    # By the time that a later request is at an engine, these had their chance.
    tasks.append(asyncio.create_task(served_by(client, body("Another", system="Be brief."))))
    await until_count(seen, 2)
    assert seen == ["Find 0", "Another"]
    gate.set()
    await asyncio.gather(*tasks)
    assert sorted(seen) == ["Another", "Find 0", "Find 1", "Find 2"]


async def test_sub_agents_go_on_when_the_engine_reports_the_prefix(
    start: Start,
) -> None:
    gate, seen = asyncio.Event(), []

    async def slow(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["messages"][1]["content"])
        await gate.wait()
        return web.json_response({"engine": "a"})

    engine = telling("a", [snapshot()])
    engine.answer = slow
    client = await start(engine)
    tasks = []
    for number in range(2):
        tasks.append(asyncio.create_task(served_by(client, body(f"Find {number}"))))
        await until_count(seen, 1)
    engine.events[0].put_nowait(event(2, body("Find 0")))

    async def both() -> bool:
        return seen == ["Find 0", "Find 1"]

    await until(both)
    gate.set()
    await asyncio.gather(*tasks)


async def test_an_engine_that_is_full_is_passed_over_for_another(start: Start) -> None:
    async def full(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "queue is full"}, status=503)

    client = await start(Engine("full", full), Engine("free"))
    assert {await served_by(client, body(f"{n}", system=f"{n}" * 99)) for n in range(6)} == {"free"}


async def test_the_last_engines_own_503_is_passed_on(start: Start) -> None:
    async def full(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "queue is full"}, status=503)

    client = await start(Engine("full", full))
    answer = await client.post(CHAT, json=body("Hello"))
    assert (answer.status, await answer.json()) == (503, {"error": "queue is full"})


async def test_a_client_s_mistakes_never_open_the_breaker(start: Start) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no"}, status=400)

    client = await start(Engine("a", refuse))
    for _ in range(20):
        assert (await client.post(CHAT, json=body("Hello"))).status == 400
    page = await (await client.get("/metrics")).text()
    assert "sgl_ext_worker_breaker_open{" in page
    assert "} 1.0" not in next(line for line in page.splitlines() if "breaker_open{" in line)


async def test_an_engine_that_keeps_failing_gets_no_requests(start: Start) -> None:
    is_sick = True

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"engine": "bad"}, status=500 if is_sick else 200)

    bad = Engine("bad", answer)
    client = await start(bad, Engine("good"))
    number = count()

    async def ask() -> int:
        text = f"{next(number)}"
        return (await client.post(CHAT, json=body(text, system=text * 99))).status

    async def is_open() -> bool:
        page = await (await client.get("/metrics")).text()
        return f'sgl_ext_worker_breaker_open{{worker="{bad.url}"}} 1.0' in page

    while not await is_open():
        await ask()
    assert {await ask() for _ in range(30)} == {200}
    is_sick = False

    async def is_back() -> bool:
        return not await is_open()

    await until(is_back)
    before = len(bad.seen)
    assert {await ask() for _ in range(30)} == {200}
    assert len(bad.seen) > before


async def test_no_client_can_shut_out_a_healthy_engine(start: Start) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        trips_it = "bomb" in await request.text()
        return web.json_response({"engine": "a"}, status=500 if trips_it else 200)

    engine = Engine("a", answer)
    client = await start(engine)

    def trials() -> int:
        return [path for path, _, _ in engine.seen].count("/health_generate")

    for number in range(3):
        while trials() == number:
            assert (await client.post(CHAT, json=body("bomb"))).status == 500
        assert await served_by(client, body("Hello")) == "a"
    page = await (await client.get("/metrics")).text()
    assert f'sgl_ext_worker_breaker_open{{worker="{engine.url}"}} 0.0' in page


async def test_predicted_tokens_are_compared_with_reported_ones(
    start: Start, tmp_path: Any
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 5100, "prompt_tokens_details": {"cached_tokens": 4990}}
        return web.json_response({"engine": "a", "usage": usage})

    engine = telling("a", [snapshot(1, body("Hello"))])
    engine.answer = answer
    log = tmp_path / "requests.log"
    client = await start(engine, request_log=str(log))
    await until_held(client, engine, body("Hello"), 5000)
    await served_by(client, body("Hello", "Hi.", "Go on"))
    page = await (await client.get("/metrics")).text()
    assert f'sgl_ext_predicted_cached_tokens_total{{worker="{engine.url}"}} 5000.0' in page
    assert f'sgl_ext_reported_cached_tokens_total{{worker="{engine.url}"}} 4990.0' in page
    assert f'sgl_ext_prediction_error_tokens_sum{{worker="{engine.url}"}} 10.0' in page

    async def written() -> bool:
        return bool(log.read_text())

    await until(written)
    (line,) = log.read_text().splitlines()
    record = orjson.loads(line)
    assert (record["route"], record["worker"], record["reason"]) == (CHAT, engine.url, "home")
    assert (record["predicted_tokens"], record["reported_tokens"]) == (5000, 4990)
    assert record["expected_tokens"] == 5000
    assert "Hello" not in line, "a log of requests holds none of their words"


async def test_usage_is_read_when_the_end_of_a_stream_arrives_alone(start: Start) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for event in (b'{"choices": []}', b'{"usage": {"cached_tokens": 7}}', b"[DONE]"):
            await stream.write(b"data: %b\n\n" % event)
            await arrived.get()
        return stream

    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    engine = Engine("a", answer)
    client = await start(engine)
    async with client.post(CHAT, json=body("Hello")) as answered:
        async for line in answered.content:
            if line != b"\n":
                await arrived.put(line)
    assert line == b"\n"
    page = await (await client.get("/metrics")).text()
    assert f'sgl_ext_reported_cached_tokens_total{{worker="{engine.url}"}} 7.0' in page


async def test_full_engines_are_retried_as_far_as_the_budget_goes(start: Start) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        status = 503 if request.path == CHAT else 200
        return web.json_response({"error": "queue is full"}, status=status)

    engines = [Engine("a", full), Engine("b", full)]
    client = await start(*engines)
    for number in range(100):
        answer = await client.post(CHAT, json=body(f"{number}"))
        assert (answer.status, await answer.json()) == (503, {"error": "queue is full"})
    sent = [path for engine in engines for path, _, _ in engine.seen if path == CHAT]
    retries = len(sent) - 100
    assert 20 < retries <= 31
    page = await (await client.get("/metrics")).text()
    assert f"sgl_ext_retries_rejected_total {100 - retries}.0" in page


async def test_no_request_is_lost_when_one_of_two_engines_dies(start: Start) -> None:
    gate = asyncio.Event()

    async def die(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    dying, well = Engine("dying", die), Engine("well", held_back(gate))
    client = await start(dying, well)
    tasks = [
        asyncio.create_task(served_by(client, body("Hello", system=f"{number}" * 99)))
        for number in range(90)
    ]

    async def all_are_sent() -> bool:
        return len(dying.seen) + len(well.seen) == 90

    await until(all_are_sent)
    assert len(dying.seen) > 30
    gate.set()
    assert set(await asyncio.gather(*tasks)) == {"a"}


async def test_a_request_that_kills_engines_kills_two_at_most(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "SUSPECT_S", 3600.0)  # on a slow machine its end takes a while

    async def die(request: web.Request) -> web.StreamResponse:
        if b"poison" in await request.read():
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"engine": "well"})

    engines = [Engine(name, die) for name in "abcd"]
    client = await start(*engines)
    answer = await client.post(CHAT, json=body("poison"))
    assert answer.status == 502
    message = (await answer.json())["error"]["message"]
    assert message == "Engines failed 2 times before they answered this request."
    assert sum(len(engine.seen) for engine in engines) == 2
    assert await served_by(client, body("Hello")) == "well"


class Mortal(Engine):
    """An engine that ends when it gets poison."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self.run)

    async def run(self, request: web.Request) -> web.StreamResponse:
        if b"poison" in await request.read():
            assert self.server is not None
            runner = self.server.runner
            assert runner is not None
            assert runner.server is not None
            for site in list(runner.sites):
                await site.stop()
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        return web.json_response({"engine": self.name})


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/messages", "invalid_request_error"), (CHAT, "invalid_request_error")],
)
async def test_a_request_that_ended_two_engines_is_refused(
    start: Start, path: str, kind: str
) -> None:
    engines = [Mortal(name) for name in "abcd"]
    client = await start(*engines)
    poison = body("poison")
    answer = await client.post(path, json=poison)
    assert answer.status == 502
    ended = [engine for engine in engines if engine.seen]
    assert len(ended) == 2
    answer = await client.post(path, json=poison)
    assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
    error = (await answer.json())["error"]
    assert error["type"] == kind
    assert error["message"].startswith("Two engines ended while they ran this request")
    assert sum(len(engine.seen) for engine in engines) == 2
    answer = await client.post(path, json=body("Hello"))
    assert answer.status == 200
    counted = 'sgl_ext_suspect_requests_total{result="RESULT"} 1.0'
    for result in ("suspected", "convicted", "refused"):
        assert await shown(client, counted.replace("RESULT", result))


async def test_what_was_beside_a_request_that_ends_engines_is_answered(start: Start) -> None:
    """Two engines end within a second, each with many requests."""
    gate = asyncio.Event()

    class Slow(Mortal):
        async def run(self, request: web.Request) -> web.StreamResponse:
            if b"poison" not in await request.read():
                await gate.wait()
            return await super().run(request)

    engines = [Slow(name) for name in "abcd"]
    client = await start(*engines)
    beside = [
        asyncio.create_task(served_by(client, body("Hello", system=f"{number}" * 99)))
        for number in range(8)
    ]

    async def all_are_sent() -> bool:
        return sum(len(engine.seen) for engine in engines) == 8

    await until(all_are_sent)
    poison = await client.post(CHAT, json=body("poison"))
    gate.set()
    assert poison.status == 502
    assert len(await asyncio.gather(*beside)) == 8


async def test_running_requests_continue_on_an_engine_that_refuses_connections(
    start: Start,
) -> None:
    gate = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await gate.wait()
        await response.write(b"data: two\n\n")
        return response

    engine = Engine("a", stream)
    client = await start(engine)
    async with client.post(CHAT, json=body("Hello")) as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: one\n\n"
        assert engine.server is not None
        assert engine.server.runner is not None
        for site in list(engine.server.runner.sites):
            await site.stop()
        assert (await client.post(CHAT, json=body("Other"))).status == 503
        gate.set()
        assert await answer.content.read() == b"data: two\n\n"


async def test_a_hanging_scheduler_is_detected_and_its_requests_go_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "LAST_WAIT_S", 0)
    monkeypatch.setattr(silence, "HANG_S", 0.3)
    monkeypatch.setattr(worker_probes, "_GENERATE_TIMEOUT", ClientTimeout(total=0.5))
    hangs = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if hangs.is_set():
            await asyncio.Event().wait()
        return web.json_response({"engine": "stuck"})

    stuck, good = telling("stuck", [snapshot()]), telling("good", [snapshot()])
    stuck.answer = answer
    client = await start(stuck, good)
    while await served_by(client, body("Hello")) != "stuck":
        await client.delete("/sgl_ext/workers", params={"url": good.url})
    await client.post("/sgl_ext/workers", json={"url": good.url})
    hangs.set()
    assert await served_by(client, body("Hello", "Hi.", "Go on")) == "good"
    assert "/health_generate" in [path for path, _, _ in stuck.seen]
    hangs.clear()
    await until(lambda: is_ready(client, stuck))


async def test_a_frozen_engine_is_found_though_its_clients_leave_soon(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "STALLED_S", 0.3)
    monkeypatch.setattr(worker_probes, "_GENERATE_TIMEOUT", ClientTimeout(total=0.5))
    freezes, arrived = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if freezes.is_set():
            if request.path == CHAT:
                arrived.set()
            await asyncio.Event().wait()
        return web.json_response({"engine": "stuck"})

    stuck, good = telling("stuck", [snapshot()]), telling("good", [snapshot()])
    stuck.answer = answer
    client = await start(stuck, good)
    while await served_by(client, body("Hello")) != "stuck":
        await client.delete("/sgl_ext/workers", params={"url": good.url})
    await client.post("/sgl_ext/workers", json={"url": good.url})
    freezes.set()
    line = f'sgl_ext_worker_state{{state="STATE",worker="{stuck.url}"}} 1.0'
    stalled = line.replace("STATE", "stalled")
    async with asyncio.timeout(HANG_S):
        for turn in count():  # each another request: none takes an earlier one over
            arrived.clear()
            asked = asyncio.create_task(served_by(client, body("Hello", "Hi.", f"Go on {turn}")))
            came = asyncio.create_task(arrived.wait())
            await asyncio.wait({asked, came}, return_when=asyncio.FIRST_COMPLETED)
            came.cancel()
            asked.cancel()  # the client has no more patience
            if await shown(client, stalled):
                break
    assert await served_by(client, body("Hello", "Hi.", "Go on")) == "good"
    assert await shown(client, stalled)
    rows = (await (await client.get("/sgl_ext/state")).json())["engines"]
    row = next(row for row in rows if row["url"] == stuck.url)
    assert (row["state"], row["fault"]) == ("stalled", "its scheduler stands still")
    freezes.clear()
    await until(lambda: shown(client, line.replace("STATE", "ready")))


async def test_the_last_engine_is_waited_for_while_it_stands_still(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "STALLED_S", 0.3)
    monkeypatch.setattr(silence, "STEP_FACTOR", 0)
    goes_on = asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        await goes_on.wait()
        return web.json_response({"engine": "only"})

    only = telling("only", [snapshot()])
    only.answer = answer
    client = await start(only)
    first = asyncio.create_task(served_by(client, body("Hello")))

    async def stands_still() -> bool:
        return (await (await client.get("/ready")).text()) == "every engine stands still\n"

    await until(stands_still)
    second = asyncio.create_task(served_by(client, body("Another")))
    await until_queued(client, 1)
    assert [path for path, _, _ in only.seen].count(CHAT) == 1
    goes_on.set()
    assert await asyncio.gather(first, second) == ["only", "only"]
    assert not await stands_still()


async def test_followers_on_a_hanging_engine_go_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait for the prefix that another request computes, and were never sent."""
    monkeypatch.setattr(suspects, "LAST_WAIT_S", 0)
    monkeypatch.setattr(silence, "HANG_S", 0.3)
    monkeypatch.setattr(worker_probes, "_GENERATE_TIMEOUT", ClientTimeout(total=0.5))

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    stuck, good = telling("stuck", [snapshot()]), telling("good", [snapshot()])
    stuck.answer = hang
    client = await start(stuck, good)
    await client.delete("/sgl_ext/workers", params={"url": good.url})
    await until(lambda: is_drained(client, good))
    tasks = [asyncio.create_task(served_by(client, body(f"Find {n}"))) for n in range(6)]

    async def all_are_placed() -> bool:
        document = await (await client.get("/sgl_ext/workers")).json()
        return sorted(worker["in_flight"] for worker in document["workers"]) == [0, 6]

    await until(all_are_placed)
    await client.post("/sgl_ext/workers", json={"url": good.url})
    async with asyncio.timeout(HANG_S):
        assert set(await asyncio.gather(*tasks)) == {"good"}
    sent = [path for path, _, _ in stuck.seen].count(CHAT)
    assert sent == 1, "the followers are not sent to the engine that hangs"


@pytest.mark.parametrize("says_so", [False, True])
async def test_an_engine_hangs_that_answers_no_probe_or_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, *, says_so: bool
) -> None:
    monkeypatch.setattr(suspects, "LAST_WAIT_S", 0)
    monkeypatch.setattr(worker_probes, "_PROBE_TIMEOUT", ClientTimeout(total=0.1))
    hangs = asyncio.Event()

    class Silent(Engine):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            if hangs.is_set() and says_so and request.path == "/ready":
                return web.Response(status=504)
            if hangs.is_set():
                await asyncio.Event().wait()
            return await super().handle(request)

    async def begin(_: web.Request) -> web.StreamResponse:
        hangs.set()
        await asyncio.Event().wait()
        raise AssertionError

    silent, good = Silent("silent", begin), Engine("good")
    client = await start(silent, good)
    async with asyncio.timeout(HANG_S):
        while not hangs.is_set():
            text = f"{len(good.seen)}"
            assert await served_by(client, body(text, system=text * 99)) == "good"
    assert not await is_ready(client, silent)


async def is_ready(client: ClientSession, engine: Engine) -> bool:
    document = await (await client.get("/sgl_ext/workers")).json()
    return engine.url in [worker["url"] for worker in document["workers"] if worker["ready"]]
