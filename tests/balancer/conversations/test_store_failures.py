"""A store that is locked, full, lost or slow: requests are answered, and clients learn of it."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store import sqlite
from sgl_ext.balancer.store.documents import MAX_QUEUED_BYTES, Document, StoreFailed
from sgl_ext.balancer.store.sqlite import DocumentStore, StoreThread
from tests.balancer.conftest import Engine, Start

PATH = "/v1/responses"
CONTEXT = {"blocks": [{"id": "rules", "layer": "stable", "content": "Be brief."}]}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    monkeypatch.setattr(sqlite, "_WRITE_PAUSE_S", 0.0)


class Answering:
    """An engine whose responses are `resp_1`, `resp_2` and so on."""

    def __init__(self) -> None:
        self.count = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.count += 1
        response = {"id": f"resp_{self.count}", "object": "response", "status": "completed"}
        response |= {"output": [], "store": True}  # type: ignore[dict-item]
        return web.json_response(response)


async def begin(start: Start, store: Path, **config: Any) -> ClientSession:
    return await start(Engine("a", Answering().answer), store=str(store), **config)


async def ask(client: ClientSession, **body: Any) -> tuple[int, Any]:
    answer = await client.post(PATH, json={"model": "m", "input": "One", **body})
    return answer.status, await answer.json()


async def stores_again(client: ClientSession) -> dict[str, Any]:
    """A response that was stored; earlier ones may not have been."""
    while not (answer := (await ask(client))[1])["store"]:
        pass
    document: dict[str, Any] = answer
    return document


async def failures(client: ClientSession) -> float:
    page = await (await client.get("/metrics")).text()
    name = 'sgl_ext_store_events_total{event="failed"} '
    return sum(float(line.removeprefix(name)) for line in page.splitlines() if name in line)


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """No file of this process grows beyond the size of this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program writes and does not end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.parametrize("fault", [locked, full_disk])
async def test_a_store_that_cannot_be_written_delays_no_answer_and_loses_none(
    start: Start, tmp_path: Path, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.sqlite"
    client = await begin(start, path)
    context = await (await client.post("/v1/contexts", json=CONTEXT)).json()
    assert (await ask(client))[1]["store"] is True
    with fault(path):
        for _ in range(3):
            status, answer = await ask(client, input="x" * 100_000)
            assert (status, answer["store"]) == (200, False)
            assert (await client.get("/health")).status == 200
        other = {"blocks": [{**CONTEXT["blocks"][0], "content": "y" * 100_000}]}
        refused = await client.post("/v1/contexts", json=other)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        status, _ = await ask(client, previous_response_id="resp_1")
        assert status == 200, "what is stored can be read"
        shown = await client.get(f"/v1/contexts/{context['context_id']}")
        assert shown.status == 200
        assert await failures(client) >= 4
    stored = await stores_again(client)
    assert (await ask(client, previous_response_id=stored["id"]))[0] == 200
    logged = [r for r in caplog.records if "writing the store" in r.message and r.levelno >= 40]
    assert len(logged) == 1


async def test_a_store_that_cannot_be_read_is_503_and_not_404(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    client = await begin(start, path)
    context = await (await client.post("/v1/contexts", json=CONTEXT)).json()
    await ask(client)
    path.rename(tmp_path / "lost")
    path.mkdir()
    assert (await ask(client))[1]["store"] is False
    body = {"previous_response_id": "resp_1", "input": "Two"}
    for answer in (
        await client.post(PATH, json=body),
        await client.get(f"{PATH}/resp_1"),
        await client.get(f"{PATH}/resp_1/input_items"),
        await client.delete(f"{PATH}/resp_1"),
        await client.get(f"/v1/contexts/{context['context_id']}"),
        await client.delete(f"/v1/contexts/{context['context_id']}"),
        await client.post("/v1/chat/completions", json={"context_id": context["context_id"]}),
    ):
        assert (answer.status, answer.headers["retry-after"]) == (503, "5"), answer.url
    assert (await client.post("/v1/chat/completions", json={"messages": []})).status == 200
    path.rmdir()
    (tmp_path / "lost").rename(path)
    status, _ = await ask(client, previous_response_id="resp_1")
    assert status == 200


async def test_a_store_that_was_removed_is_made_again(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "store.sqlite"
    client = await begin(start, path)
    await ask(client)
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    status, answer = await ask(client, previous_response_id="resp_1")
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
    stored = await stores_again(client)
    after = await begin(start, path)
    assert (await ask(after, previous_response_id=stored["id"]))[0] == 200
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_the_log_of_writes_keeps_its_limit_in_a_burst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LIMIT_BYTES", limit := 1 << 20)
    path, size = tmp_path / "store.sqlite", 300_000
    with (
        closing(DocumentStore(str(path), 1 << 30)) as first,
        closing(DocumentStore(str(path), 1 << 30)) as second,
    ):
        for number in range(20):
            for store in (first, second):
                store.put("a", Document(str(number), bytes(size), b""), 60.0, now=0.0)
                assert (tmp_path / "store.sqlite-wal").stat().st_size < limit + 2 * size


@pytest.fixture
def slow() -> Iterator[tuple[StoreThread, threading.Event]]:
    """A store whose thread waits for the event, if the queries of a test do."""
    disk = threading.Event()
    yield StoreThread(DocumentStore(":memory:", 1 << 20), Metrics(), wait_s=0.02), disk
    disk.set()


async def test_nothing_waits_for_a_disk_that_hangs(
    slow: tuple[StoreThread, threading.Event],
) -> None:
    store, disk = slow
    with pytest.raises(StoreFailed):
        await store.read(lambda _: disk.wait())
    ran: list[int] = []
    for number in range(1000):
        with pytest.raises(StoreFailed):
            await store.read(lambda _, number=number: ran.append(number))  # type: ignore[misc]
    assert store._queued == 1
    disk.set()
    while not ran:
        await asyncio.sleep(0)
        with suppress(StoreFailed):
            await store.read(lambda _: ran.append(-1))
    assert ran == [-1]
    await store.close()


async def test_what_waits_is_bounded(slow: tuple[StoreThread, threading.Event]) -> None:
    store, disk = slow
    store._wait_s = 20.0  # what is rejected waits for nothing
    half = MAX_QUEUED_BYTES // 2
    waiting = [asyncio.create_task(store.write(lambda _: disk.wait(), half)) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert done == {waiting[2]}
    assert isinstance(waiting[2].exception(), StoreFailed)
    disk.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await store.close()
