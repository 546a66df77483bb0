"""A server that hangs or dies and comes back: calls fail in time, and nothing that was stored is
lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import Calls
from sgl_ext.balancer.store.documents import (
    MAX_QUEUED_BYTES,
    Document,
    Documents,
    StoreFailed,
)
from sgl_ext.balancer.store.opening import open_store
from sgl_ext.balancer.store.shared_state import SharedState
from tests.balancer.store.conftest import Shorten, emptied, named
from tests.balancer.store.servers import PASSWORD, Server
from tests.waiting import HANG_S

_T = TypeVar("_T")
Both = Callable[[Metrics], tuple[Documents, SharedState]]


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    """Opens the store that the variable names, for documents and what is shared."""
    async with AsyncExitStack() as stack:

        def begin(metrics: Metrics) -> tuple[Documents, SharedState]:
            documents, state, _ = open_store("env:STORE", 1 << 20, metrics, None)
            assert documents is not None
            assert state is not None
            stack.push_async_callback(documents.close)
            stack.push_async_callback(state.close)
            return documents, state

        yield begin


async def put(store: Documents, id: str) -> int | None:
    return await store.put("k a", Document(id, b"items", b"about"), 1e6, 0.0)


async def works_again(call: Callable[[], Awaitable[_T]]) -> _T:
    """What a call returns once the store's server answers again."""
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(StoreFailed):
                return await call()
            await asyncio.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_an_outage_fails_calls_in_time_and_loses_nothing(
    server: Server,
    both: Both,
    shortened: Shorten,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    await asyncio.to_thread(named, server, monkeypatch)
    store, state = both(metrics)
    for number in range(20):
        assert await put(store, f"r{number}") == 0
    assert await asyncio.gather(*(store.get("k a", f"r{n}", 0.0) for n in range(20)))

    async def fails() -> None:
        async with asyncio.timeout(HANG_S):
            for number in range(50):
                with pytest.raises(StoreFailed):
                    await store.get("k a", "r1", 0.0)
                with pytest.raises(StoreFailed):
                    await put(store, f"new{number}")
            await store.use("k a", "r1", 1e6)
            with pytest.raises(StoreFailed):
                await state.count_present("me")

    async def hangs() -> None:
        done = await asyncio.gather(
            *(store.get("k a", "r1", 0.0) for _ in range(9)), return_exceptions=True
        )
        assert all(isinstance(each, StoreFailed) for each in done)
        waiting = [asyncio.create_task(put(store, f"w{n}")) for n in range(9)]
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, StoreFailed) for each in done)

    if fault == "pause":
        with server.paused(), shortened():
            await hangs()
    else:
        server.kill()
        try:
            with shortened():
                await fails()
        finally:
            await asyncio.to_thread(server.start)
    await works_again(lambda: put(store, "again"))
    # Calls that began in the outage may still wait, and fail what comes meanwhile.
    for number in range(20):
        assert await works_again(lambda id=f"r{number}": store.get("k a", id, 0.0)) is not None  # type: ignore[misc]
    assert metrics.store_events.counts[("failed",)] >= 9
    logged = [r for r in caplog.records if "writing the store" in r.message and r.levelno >= 40]
    assert len(logged) == 1
    assert PASSWORD not in caplog.text


@pytest.mark.usefixtures("patient")
async def test_a_store_that_was_emptied_is_used_again(
    server: Server, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(named, server, monkeypatch)
    store, _ = both(Metrics())
    await put(store, "r1")
    await asyncio.to_thread(emptied, server)
    await works_again(lambda: put(store, "again"))
    assert await store.get("k a", "r1", 0.0) is None
    assert await store.get("k a", "again", 0.0) is not None


async def test_what_waits_for_a_server_is_bounded() -> None:
    calls, answer = Calls("trying", lambda _: None), asyncio.Event()
    half = MAX_QUEUED_BYTES // 2
    waiting = [asyncio.create_task(calls.run(answer.wait, half)) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert done == {waiting[2]}
    assert isinstance(waiting[2].exception(), StoreFailed)
    answer.set()
    await asyncio.gather(*waiting[:2])
    assert await calls.run(answer.wait, half)


async def test_while_a_server_fails_one_call_at_a_time_tries_it() -> None:
    calls, answer, tried = Calls("trying", lambda _: None, 0.01), asyncio.Event(), []

    async def call(id: int) -> int:
        tried.append(id)
        await answer.wait()
        return id

    for id in range(5):
        with pytest.raises(StoreFailed):
            await calls.run(lambda id=id: call(id))  # type: ignore[misc]
    assert tried == [0]
    answer.set()
    while True:
        try:
            assert await calls.run(lambda: call(9)) == 9
        except StoreFailed:
            await asyncio.sleep(0)
            continue
        break
    assert tried == [0, 9]
