"""Balancers on two nodes that share a store: what they share, and what an outage costs."""

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.keys import add_key
from tests.balancer.conftest import Engine, Start
from tests.balancer.store.conftest import Shorten
from tests.balancer.store.servers import Server

PATH = "/v1/responses"


class Answering:
    """An engine's responses: `resp_1`, `resp_2` and so on."""

    count = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        Answering.count += 1
        id = f"resp_{Answering.count}"
        response = {"id": id, "object": "response", "status": "completed", "store": True}
        return web.json_response({**response, "output": []})


async def ask(client: ClientSession, **body: Any) -> tuple[int, Any]:
    answer = await client.post(PATH, json={"model": "m", "input": "One", **body})
    return answer.status, await answer.json()


@pytest.mark.long
@pytest.mark.usefixtures("setting")
async def test_balancers_continue_each_others_responses_and_outlive_the_store(
    start: Start, server: Server, shortened: Shorten
) -> None:
    engines = [Engine(name, Answering().answer) for name in "ab"]
    one, two = [await start(engine, store="env:STORE") for engine in engines]
    _, first = await ask(one)
    status, second = await ask(two, previous_response_id=first["id"], input="Two")
    assert (status, second["store"]) == (200, True)
    assert [item["content"] for item in _sent(engines[1])] == ["One", "Two"]
    server.kill()
    try:
        with shortened():
            status, alone = await ask(one)
            assert (status, alone["store"]) == (200, False)
            status, error = await ask(one, previous_response_id=second["id"])
            assert status == 503
            assert "store of responses" in error["error"]["message"]
            plain = await one.post("/v1/chat/completions", json={"messages": []})
            assert plain.status == 200
            assert (await one.get("/health")).status == 200
    finally:
        server.start()
    status = 503
    while status == 503:
        status, _ = await ask(one, previous_response_id=second["id"], input="Three")
    assert status == 200
    assert [item["content"] for item in _sent(engines[0])] == ["One", "Two", "Three"]


@pytest.mark.usefixtures("setting", "patient")
async def test_a_tenant_s_limit_holds_over_two_balancers(start: Start, tmp_path: Any) -> None:
    path = tmp_path / "keys.toml"
    key, _ = add_key(path, "ann")
    path.write_text(path.read_text() + "\n[tenants.ann]\nrequests_per_minute = 40\n")
    clients = [
        await start(Engine(name), store="env:STORE", store_limit_bytes=0, keys=str(path))
        for name in "ab"
    ]
    statuses, now = [], asyncio.get_running_loop().time
    began_s = now()
    for number in range(100):
        answer = await clients[number % 2].post(
            "/v1/chat/completions",
            json={"messages": []},
            headers={"authorization": f"Bearer {key}"},
        )
        statuses.append(answer.status)
        assert answer.status == 200 or int(answer.headers["retry-after"]) >= 1
    assert statuses[:38] == [200] * 38
    # What flows in while the test runs may be admitted, too.
    assert statuses.count(200) <= 50 + (now() - began_s) * 40 / 60


@pytest.mark.usefixtures("setting", "patient")
async def test_a_request_leases_again_what_was_put_back_before_it_was_admitted(
    start: Start, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not used is put back every second, also a moment after a request has leased it."""
    lease, leases = RateLimits._lease, []

    async def put_back(limits: RateLimits, *args: Any) -> None:
        await lease(limits, *args)
        leases.append(args)
        if len(leases) == 1:
            await limits.sync()

    monkeypatch.setattr(RateLimits, "_lease", put_back)
    path = tmp_path / "keys.toml"
    key, _ = add_key(path, "ann")
    path.write_text(path.read_text() + "\n[tenants.ann]\nrequests_per_minute = 40\n")
    client = await start(Engine("a"), store="env:STORE", store_limit_bytes=0, keys=str(path))
    headers = {"authorization": f"Bearer {key}"}
    answer = await client.post("/v1/chat/completions", json={"messages": []}, headers=headers)
    assert (answer.status, len(leases)) == (200, 2)


def _sent(engine: Engine) -> Any:
    """The input items that an engine got last."""
    import orjson

    return orjson.loads(engine.seen[-1][1])["input"]
