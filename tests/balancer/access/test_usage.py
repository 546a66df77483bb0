"""Requests without a key count for their tenant and day, within a bound, and survive a restart."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import ClientSession

from sgl_ext.balancer.access.usage import MOST_TENANTS, OTHERS, UsageLedger
from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings
from tests.balancer.conftest import Engine, Start


def test_tenants_that_clients_name_are_bounded() -> None:
    ledger = UsageLedger(clock=lambda: 1e9)
    for number in range(MOST_TENANTS + 50):
        ledger.count_tenant(f"t{number}", 1)
    assert len(ledger._tenants) == MOST_TENANTS + 1
    assert ledger._tenants[OTHERS] == [50, 50]


async def used(client: ClientSession) -> dict[str, int]:
    async with client.get("/sgl_ext/usage") as answer:
        assert answer.status == 200
        return {use["tenant"]: use["requests"] for use in (await answer.json())["usage"]}


async def test_use_survives_a_restart(start: Start, tmp_path: Path) -> None:
    client = await start(Engine("a"))
    settings = BalancerSettings(
        workers=((await (await client.get("/health")).json())["workers"][0]["url"],),
        store=str(tmp_path / "store.sqlite"),
        port=0,
        drain_s=0,
        drain_min_s=0,
    )
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for earlier in range(3):
        async with AsyncExitStack() as stack:
            balancer = Balancer(settings, interval_s=0.1)
            await balancer.start()
            stack.push_async_callback(balancer.stop)
            url = f"http://127.0.0.1:{balancer.port}"
            own = await stack.enter_async_context(ClientSession(url))
            assert await used(own) == ({"alice": earlier} if earlier else {})
            assert (await own.get("/sgl_ext/usage?month=soon")).status == 400
            headers = {"x-tenant-id": "alice"}
            async with own.post("/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
