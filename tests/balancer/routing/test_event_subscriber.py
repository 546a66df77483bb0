"""What the balancer makes of what an engine says that it publishes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.balancer.admin.test_state import LOAD, chat, repeated, reporting, state
from tests.balancer.conftest import Engine, Start

FIRST = {"snapshot": True, "cleared": True}
NOTE = "publishes no prefixes: it is routed to by what this balancer sent there"


async def noted(start: Start, engine: Engine, wanted: str | None) -> dict[str, Any]:
    """The state of an engine, once its load is known and its note is the wanted one."""
    client = await start(engine)

    async def shown() -> dict[str, Any]:
        found: dict[str, Any] = (await state(client))["engines"][0]
        return found

    return await repeated(shown, lambda row: row["kv"] is not None and row["note"] == wanted)


async def test_an_engine_that_publishes_its_load_alone_is_said_to(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engine = reporting({**FIRST, "publishes": ["load"], "load": LOAD}, {"complete": True})
    client = await start(engine)

    async def metrics() -> str:
        return await (await client.get("/metrics")).text()

    def said() -> int:
        return sum(NOTE in record.getMessage() for record in caplog.records)

    page = await repeated(metrics, lambda _: said())
    assert f'sgl_ext_worker_subscribed{{worker="{engine.url}"}} 0.0' in page
    for _ in range(20):
        await metrics()
    assert said() == 1
    (worker,) = (await (await client.get("/sgl_ext/workers")).json())["workers"]
    assert worker["publishes_prefixes"] is False


async def test_its_conversations_return_to_it(start: Start) -> None:
    lines = {**FIRST, "publishes": ["load"], "load": LOAD}, {"complete": True}
    client = await start(reporting(*lines), reporting(*lines))
    for _ in range(4):
        await chat(client, **{"x-session-id": "s"})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    explained = await client.post("/sgl_ext/explain/v1/chat/completions", json=body)
    assert sum(each["held_tokens"] > 0 for each in (await explained.json())["workers"]) == 1


async def test_an_engine_that_publishes_prefixes_has_no_note(start: Start) -> None:
    both = {**FIRST, "publishes": ["prefixes", "load"], "load": LOAD}
    await noted(start, reporting(both, {"complete": True}), None)


async def test_an_engine_says_it_when_its_scheduler_has_said_it(start: Start) -> None:
    first = {**FIRST, "publishes": [], "load": LOAD}
    await noted(start, reporting(first, {"complete": True}), NOTE)
    later = {"publishes": ["prefixes", "load"]}
    await noted(start, reporting(first, {"complete": True}, later), None)
