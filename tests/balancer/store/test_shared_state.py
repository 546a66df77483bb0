"""What balancers share through a server: limits, presence, versions and messages."""

import asyncio
from pathlib import Path

import pytest

from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.shared_state import Lease, SharedState
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.store.conftest import Share
from tests.waiting import HANG_S


async def test_a_bucket_leases_what_it_has(shared: Share) -> None:
    one, two = shared(), shared()
    now = asyncio.get_running_loop().time
    began_s = now()
    full = await one.lease(Lease("a", 100.0, need=30.0, extra=10.0))
    assert full.tokens == 40
    assert full.level == pytest.approx(60)
    rest = await two.lease(Lease("a", 100.0, need=50.0, extra=50.0))
    # What flows in between two leases is there, too.
    assert rest.tokens + 1e-6 >= 60
    assert rest.tokens <= 60 + (now() - began_s) * 100 / 60 + 1
    rejected = await one.lease(Lease("a", 100.0, need=100.0))
    assert rejected.tokens == 0
    back = await two.lease(Lease("a", 100.0, take=-55.0, need=50.0))
    assert back.tokens == 50
    paid = await one.lease(Lease("a", 100.0, take=500.0))
    assert paid.level <= -400


async def test_a_full_bucket_leases_more_than_it_holds_once(shared: Share) -> None:
    state = shared()
    assert (await state.lease(Lease("a", 100.0, need=5000.0, extra=9.0))).tokens == 5000
    assert (await state.lease(Lease("a", 100.0, need=1.0))).tokens == 0
    assert (await state.lease(Lease("b", 100.0, take=-9.0, need=100.0))).tokens == 100


async def test_a_limit_holds_over_two_balancers(shared: Share, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.a]\nrequests_per_minute = 2000\n")
    both = [
        RateLimits(KeyFileReloader(path, made), made, state=shared())
        for made in (Metrics(), Metrics())
    ]

    async def flood(limits: RateLimits) -> int:
        admitted = 0
        for number in range(3000):
            if (lease := limits.lease("a", 0)) is not None:
                await lease
            try:
                limits.admit("a", 0)
            except BalancerError:
                continue
            admitted += 1
            if number % 500 == 0:
                await limits.sync()
        return admitted

    started = asyncio.get_running_loop().time()
    admitted = sum(await asyncio.gather(*map(flood, both)))
    # What flows in while the test runs may be admitted, too.
    flowed = (asyncio.get_running_loop().time() - started) * 2000 / 60
    assert 2000 * 0.95 <= admitted <= (2000 + flowed) * 1.05


async def test_balancers_are_counted(shared: Share) -> None:
    one, two = shared(), shared()
    assert await one.count_present("one") == 1
    assert await two.count_present("two") == 2
    assert await one.count_present("one") == 2


async def test_the_newest_version_is_shared(shared: Share) -> None:
    one, two = shared(), shared()
    version = 1_790_000_000_000_000_000
    assert await one.newer("keys", -1) is None
    await one.share("keys", version, b"\x00new\xff")
    await two.share("keys", version - 5, b"old")
    assert await two.newer("keys", version - 1000) == (version, b"\x00new\xff")
    assert await two.newer("keys", version) is None
    await two.share("keys", version + 1000, b"")
    assert await one.newer("keys", version) == (version + 1000, b"")


async def test_a_message_reaches_all_whole(shared: Share) -> None:
    states = [shared(), shared(), shared()]
    sent = [b"small", bytes(range(256)) * 250, b"", b"small", b"last"]
    queues: list[asyncio.Queue[bytes]] = [asyncio.Queue() for _ in states]

    async def receive(state: SharedState, queue: asyncio.Queue[bytes]) -> None:
        async for message in state.messages():
            queue.put_nowait(message)

    tasks = [asyncio.create_task(receive(*pair)) for pair in zip(states, queues, strict=True)]
    try:
        async with asyncio.timeout(HANG_S):
            while any(queue.empty() for queue in queues):
                await states[0].publish([b"there?"])
                await asyncio.sleep(0.01)
            await states[0].publish([b"begin", *sent])
            for queue in queues:
                while await queue.get() != b"begin":
                    pass
                assert [await queue.get() for _ in sent] == sent
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
