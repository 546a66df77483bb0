"""What keys used, in each kind of store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.opening import open_store
from sgl_ext.balancer.store.redis import RedisUsage
from sgl_ext.balancer.store.shared_state import Batch, UsageTable, Use

Tables = Callable[[], UsageTable]
MONTH = "2026-11"


@pytest.fixture
async def tables(place: str) -> AsyncIterator[Tables]:
    """Opens the table of one store, as several balancers do."""
    async with AsyncExitStack() as stack:

        def begin() -> UsageTable:
            store = open_store(place, 4 << 20, Metrics(), None)
            for part in (store.documents, store.shared):
                if part is not None:
                    stack.push_async_callback(part.close)
            assert store.usage is not None
            return store.usage

        yield begin


def batch(number: int, *uses: Use, writer: str = "w", forgets: str = "2025-10") -> Batch:
    return Batch(writer, number, uses, forgets)


def use(period: str = MONTH, key: str = "k", requests: int = 1, tokens: int = 10) -> Use:
    return Use(period, "bob & sons", key, requests, tokens)


async def test_uses_of_all_writers_add_up(tables: Tables) -> None:
    one, two = tables(), tables()
    await one.add(batch(1, use(), use(f"{MONTH}-28"), use(key="other")))
    await two.add(batch(1, use(tokens=5), use(f"{MONTH}-27"), writer="v"))
    assert await one.read(MONTH) == [use(requests=2, tokens=15), use(key="other")]
    assert await two.days(MONTH) == [use(f"{MONTH}-27"), use(f"{MONTH}-28")]
    assert await two.read("2026-10") == []


async def test_a_batch_is_added_once(tables: Tables) -> None:
    table = tables()
    for number in (1, 1, 2, 1, 2):
        await table.add(batch(number, use()))
    assert await table.read(MONTH) == [use(requests=2, tokens=20)]


async def test_old_periods_are_forgotten(tables: Tables) -> None:
    table = tables()
    await table.add(batch(1, use("2025-09"), use("2025-09-30"), use("2025-10-01"), use()))
    if isinstance(table, RedisUsage):  # it forgets each period by itself
        assert await table._server.client.ttl("sgl-ext:usage:2025-09") > 0
        return
    await table.add(batch(2, use()))
    assert await table.days("2025-09") == await table.read("2025-09") == []
    assert await table.days("2025-10") == [use("2025-10-01")]
