"""A prompt whose client leaves in the middle: the next request reads what was computed of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from aiohttp import ClientResponse, ClientSession
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.balancer.server import Balancer
from sgl_ext.compat.last_chunk import keep_last_chunk
from sgl_ext.settings.schema import BalancerSettings
from tests.balancer.wire import until
from tests.engine.scheduler.test_event_publisher import Engine, running_engine, text
from tests.waiting import HANG_S

CHUNK = 128
PLAIN = SimpleNamespace(supports_swa=lambda: False, supports_mamba=lambda: False)
WINDOW = SimpleNamespace(supports_swa=lambda: True, supports_mamba=lambda: False)


def aborted(**about: Any) -> tuple[Any, list[Any]]:
    """A scheduler that is about to abort a request with a chunk, and what it stores."""
    req = SimpleNamespace(
        rid="r",
        finished=lambda: False,
        discard_output_reason=None,
        session=None,
        beam_group=None,
        prefix_len=CHUNK,
        extend_end=2 * CHUNK,
    )
    stored: list[Any] = []
    scheduler = SimpleNamespace(
        _pending_chunked_abort_req=req,
        chunked_req=req,
        tree_cache=PLAIN,
        disaggregation_mode=SimpleNamespace(value="null"),
        stash_chunked_request=stored.append,
    )
    for name, value in about.items():
        setattr(req if hasattr(req, name) else scheduler, name, value)
    keep_last_chunk(scheduler)  # type: ignore[arg-type]
    return req, stored


def test_the_last_chunk_of_what_is_aborted_is_stored() -> None:
    req, stored = aborted()
    assert stored == [req]


@pytest.mark.parametrize(
    "about",
    [
        {"_pending_chunked_abort_req": None},
        {"chunked_req": None},
        {"extend_end": CHUNK},
        {"extend_end": None},
        {"discard_output_reason": "it failed"},
        {"session": "s"},
        {"tree_cache": WINDOW},
        {"disaggregation_mode": SimpleNamespace(value="prefill")},
    ],
)
def test_nothing_else_is_stored(about: dict[str, Any]) -> None:
    assert aborted(**about)[1] == []


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("abandoned") / "engine.log"
    flags = ("--chunked-prefill-size", str(CHUNK))
    with running_engine(nursery, tiny_model, log, *flags) as started:
        yield started


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": {"max_new_tokens": 3, "temperature": 0}, **more}


def test_each_chunk_that_was_computed_is_read(engine: Engine) -> None:
    prompt, gate = text(10 * CHUNK), engine.gate
    with gate.closed(), ThreadPoolExecutor() as pool:
        sent = pool.submit(
            requests.post,
            f"{engine.url}/generate",
            json=body(prompt, rid="left", stream=True),
            stream=True,
            timeout=HANG_S,
        )
        gate.arrived("left")
        step = gate.run_until(lambda event: event.computed("left") >= 5 * CHUNK)
        since = gate.mark()
        requests.post(f"{engine.url}/abort_request", json={"rid": "left"}, timeout=HANG_S)
        gate.arrived("AbortReq", since=since)
        gate.open()
        sent.result().close()
    gate.until(lambda event: event.kind == "idle", since)
    found = requests.post(f"{engine.url}/generate", json=body(prompt), timeout=HANG_S).json()
    assert found["meta_info"]["cached_tokens"] >= step.computed("left")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def balanced(engine: Engine) -> AsyncIterator[tuple[Balancer, ClientSession, Clock]]:
    """A balancer over the engine, whose left requests wait by a clock of the test."""
    settings = BalancerSettings(workers=(engine.url,), port=0, drain_s=0)
    balancer = Balancer(settings, interval_s=0.02)
    await balancer.start()
    clock = Clock()
    balancer.services.resends.clock = clock
    try:
        async with ClientSession(f"http://127.0.0.1:{balancer.port}") as client:
            yield balancer, client, clock
    finally:
        await balancer.stop()


async def hangs_up(task: asyncio.Task[ClientResponse]) -> None:
    """The client closes its connection."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_prompt_that_is_sent_again_is_computed_once(engine: Engine) -> None:
    prompt, gate, wait = text(10 * CHUNK), engine.gate, asyncio.to_thread
    asked = body(prompt, stream=True)
    async with balanced(engine) as (balancer, client, _):
        left, since = balancer.services.resends, gate.mark()
        with gate.closed():
            first = asyncio.create_task(client.post("/generate", json=asked))
            arrived = await wait(gate.until, lambda event: event.kind == "arrived", since)
            await wait(gate.run_until, lambda event: event.computed(arrived.rid) >= 3 * CHUNK)
            await hangs_up(first)
            await until(lambda: len(left) == 1)
            second = asyncio.create_task(client.post("/generate", json=asked))
            await until(lambda: not len(left))
        events = (await (await second).read()).split(b"\n\n")
        arrivals = [event.rid for event in gate.events[since:] if event.kind == "arrived"]
        assert arrivals == [arrived.rid]
        last = json.loads(events[-3].removeprefix(b"data: "))
        again = await (await client.post("/generate", json=body(prompt))).json()
        assert last["text"] == again["text"]
        assert last["meta_info"]["completion_tokens"] == 3


async def test_a_prompt_that_nobody_sends_in_time_stops_and_is_read_later(engine: Engine) -> None:
    prompt, gate, wait = text(10 * CHUNK), engine.gate, asyncio.to_thread
    asked = body(prompt, stream=True)
    async with balanced(engine) as (balancer, client, clock):
        left, since = balancer.services.resends, gate.mark()
        with gate.closed():
            first = asyncio.create_task(client.post("/generate", json=asked))
            rid = (await wait(gate.until, lambda event: event.kind == "arrived", since)).rid
            step = await wait(gate.run_until, lambda event: event.computed(rid) >= 5 * CHUNK)
            await hangs_up(first)
            await until(lambda: len(left) == 1)
            clock.now_s = 5.0
            await until(lambda: len(left) == 0)
            await wait(gate.until, lambda event: event.rid == "AbortReq", since)
        found = await (await client.post("/generate", json=body(prompt))).json()
        assert found["meta_info"]["cached_tokens"] >= step.computed(rid)
