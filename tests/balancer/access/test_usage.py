"""Requests without a key count for their tenant and day, within a bound, and survive a restart."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import ClientSession

from sgl_ext.balancer.access.usage import MOST_TENANTS, OTHERS, Amount, ModelUse, UsageLedger
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.server import Balancer
from sgl_ext.balancer.store.opening import open_store
from sgl_ext.balancer.store.shared_state import Batch, Use
from sgl_ext.key_file import ApiKey
from sgl_ext.settings.schema import BalancerSettings
from tests.balancer.conftest import Engine, Start


def test_tenants_that_clients_name_are_bounded() -> None:
    ledger = UsageLedger(clock=lambda: 1e9)
    for number in range(MOST_TENANTS + 50):
        ledger.count_tenant(f"t{number}", 1)
    assert len(ledger._tenants) == MOST_TENANTS + 1
    assert ledger._tenants[OTHERS] == {"": [50, 50]}


async def test_a_key_uses_one_budget_for_all_models_and_is_listed_by_model() -> None:
    ledger, key = UsageLedger(clock=lambda: 1e9), ApiKey("a", "0" * 64, name="k")
    for model, tokens in (("large", 5), ("small", 3), ("large", 2)):
        ledger.count(key, 1, tokens, model)
    assert ledger.used(key) == Amount(3, 10)
    assert [use[1:] for use in await ledger.days("2001-09")] == [
        ("a", "k", "large", 2, 7),
        ("a", "k", "small", 1, 3),
    ]


async def test_a_store_keeps_models_and_uses_of_before_there_were_any(tmp_path: Path) -> None:
    table = open_store(str(tmp_path / "store.sqlite"), 4 << 20, Metrics(), None).usage
    assert table is not None
    await table.add(
        Batch("w", 1, [Use(each, "a", "k", 1, 10) for each in ("2001-09", "2001-09-09")], "2000-01")
    )
    ledger, key = UsageLedger(table, clock=lambda: 1e9), ApiKey("a", "0" * 64, name="k")
    ledger.count(key, 1, 7, "large")
    ledger.count_tenant("b", 2, "small")
    for _ in range(2):
        await ledger.sync()
        assert ledger.used(key) == Amount(2, 17)
    assert await ledger.days("2001-09") == [
        ModelUse("2001-09-09", "a", "k", "", 1, 10),
        ModelUse("2001-09-09", "a", "k", "large", 1, 7),
        ModelUse("2001-09-09", "b", "", "small", 1, 2),
    ]


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
