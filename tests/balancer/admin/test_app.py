"""Health and metrics, as probes and Prometheus ask for them."""

from __future__ import annotations

from tests.balancer.conftest import Engine, Start


async def test_health_checks_are_not_counted_as_requests(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    assert (await client.get("/health")).status == 200
    await client.delete("/sgl_ext/workers", params={"url": engine.url})
    assert (await client.get("/health")).status == 503
    assert (await client.head("/health")).status == 503
    assert 'path="/health"' not in await (await client.get("/metrics")).text()


async def test_the_metrics_page_names_the_version_of_its_format(start: Start) -> None:
    client = await start(Engine("a"))
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
