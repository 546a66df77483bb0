"""Health and metrics, as probes and Prometheus ask for them."""

from __future__ import annotations

import pytest

from tests.balancer.conftest import Connect, Engine, Serve, Start
from tests.balancer.wire import Raw


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


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (b"/?" + b"x" * 8300, b"a: b"),
        (b"/", b"x" * 8300 + b": b"),
        (b"/", b"a: " + b"x" * 60_000),
        (b"/", b"\r\n".join(b"a%d: b" % number for number in range(300))),
    ],
    ids=["target", "name", "value", "headers"],
)
async def test_a_head_within_the_data_path_s_limits_is_within_those_of_the_control_plane(
    serve: Serve,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    target: bytes,
    line: bytes,
) -> None:
    wire = await connect(await serve(Raw()))
    head, body = await wire.ask(b"GET %b HTTP/1.1\r\n%b\r\n\r\n" % (target, line))
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b"sgl-ext balancer\n"
    assert not caplog.records
