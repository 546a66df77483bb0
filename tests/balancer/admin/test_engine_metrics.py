"""Every engine's metrics in one page: what Prometheus reads of them."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sgl_ext.balancer.admin import engine_metrics
from sgl_ext.balancer.admin.engine_metrics import EngineMetrics, merge
from sgl_ext.balancer.cluster.launcher import Launcher
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.key_file import hash_of
from tests.balancer.conftest import Answer, Engine, Start
from tests.balancer.workers import workers_at
from tests.debian import require_promtool

PAGE = b"""\
# HELP steps_total Steps of the engine.
# TYPE steps_total counter
steps_total{kind="a {\\"b\\"}"} 3.0
steps_total 4
# A comment.

# HELP load Work that waits, since 2024
# TYPE load gauge
load{engine="own",} +Inf
load -1.5e-05 1700000000
# EOF
"""


def families(page: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page.decode())}


def test_pages_become_one_with_each_family_once() -> None:
    page, unreadable = merge({'e"0\\': PAGE, "e1": PAGE.rstrip(b"\n"), "e2": None})
    assert not unreadable
    assert page.count(b"# HELP steps_total") == page.count(b"# TYPE steps_total") == 1
    found = families(page)
    assert found["steps"].documentation == "Steps of the engine."
    assert [(s.labels, s.value) for s in found["steps"].samples] == [
        ({"engine": engine, **labels}, value)
        for engine in ('e"0\\', "e1")
        for labels, value in (({"kind": 'a {"b"}'}, 3.0), ({}, 4.0))
    ]
    assert found["load"].samples[0].labels == {"engine": 'e"0\\', "exported_engine": "own"}
    assert found["load"].samples[1].value == -1.5e-05
    up = {s.labels["engine"]: s.value for s in found["sgl_ext_engine_up"].samples}
    assert up == {'e"0\\': 1, "e1": 1, "e2": 0}


def test_the_page_says_how_often_engines_were_started_again() -> None:
    page, _ = merge({"engine-0.3@n": PAGE}, {"engine-0": 2, "engine-1": 0})
    found = families(page)["sgl_ext_child_restarts"].samples
    assert [(s.labels, s.value) for s in found] == [
        ({"child": "engine-0"}, 2.0),
        ({"child": "engine-1"}, 0.0),
    ]


@pytest.mark.parametrize(
    "wrong", [b"<html>\n", b"steps_total\n", b"steps_total{a=\n", b"steps_total 4 x\n", b"9 9\n"]
)
def test_a_wrong_line_leaves_its_engine_out(wrong: bytes) -> None:
    page, unreadable = merge({"good": PAGE, "bad": PAGE + wrong})
    assert unreadable == ["bad"]
    found = families(page)
    engines = {s.labels["engine"] for f in ("steps", "load") for s in found[f].samples}
    assert engines == {"good"}
    assert [s.value for s in found["sgl_ext_engine_up"].samples] == [1, 0]


def test_promtool_reads_the_page() -> None:
    require_promtool()
    page, _ = merge({"e0": PAGE, "e1": PAGE})
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, check=False
    )
    assert b"error while linting" not in done.stdout + done.stderr


def engine(answer: Answer) -> Engine:
    return Engine("e", answer)


async def answer_page(_: web.Request) -> web.Response:
    return web.Response(body=PAGE)


async def answer_large(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * 2_000)


async def answer_not(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_engines_that_do_not_answer_are_left_out_and_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_metrics, "_TIMEOUT", aiohttp.ClientTimeout(total=0.5))
    monkeypatch.setattr(engine_metrics, "MOST_BYTES", 1_000)
    wrong = Engine("wrong", lambda request: _text("<html>"))
    engines = engine(answer_page), engine(answer_large), engine(answer_not), wrong
    client = await start(*engines, workers_from=())
    await client.post("/sgl_ext/workers", json={"url": "http://127.0.0.1:1"})
    answer = await client.get("/metrics/engines")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = families(await answer.read())
    up = {s.labels["engine"]: s.value for s in found["sgl_ext_engine_up"].samples}
    assert up == {each.url: float(each is engines[0]) for each in engines} | {
        "http://127.0.0.1:1": 0.0
    }
    page = families(await (await client.get("/metrics")).read())
    failures = page["sgl_ext_engine_scrape_failures"].samples
    assert {s.labels["reason"]: s.value for s in failures} == dict.fromkeys(
        ("too large", "timeout", "unreadable", "connection"), 1.0
    )


async def _text(text: str) -> web.Response:
    return web.Response(text=text)


async def test_requests_at_the_same_time_read_each_engine_once(start: Start) -> None:
    one = engine(answer_page)
    await start(one)
    workers = workers_at([one.url], metrics := Metrics())
    async with aiohttp.ClientSession() as session:
        reader = EngineMetrics(workers, session, metrics, Launcher(None))
        request = make_mocked_request("GET", "/metrics/engines")
        first, second = await asyncio.gather(reader.show(request), reader.show(request))
        assert first.body == second.body
        assert [path for path, *_ in one.seen] == ["/metrics"]
        await reader.show(request)
        assert len(one.seen) == 2, "a later request reads them again"


async def test_it_is_as_protected_as_the_balancer_s_own(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    hashed = hash_of(b"theirs")
    keys.write_text(f'[keys.k]\ntenant = "t"\nsha256 = "{hashed}"\n')
    keys.chmod(0o600)
    client = await start(engine(answer_page), keys=str(keys))
    for path in ("/metrics", "/metrics/engines"):
        assert (await client.get(path)).status == 401
        assert (await client.get(path, headers={"x-api-key": "theirs"})).status == 403


async def test_without_keys_prometheus_may_come_from_elsewhere_by_an_address(start: Start) -> None:
    client = await start(engine(answer_page))
    elsewhere, rebound = {"host": "10.0.0.7:30000"}, {"host": "node.example:30000"}
    for path in ("/metrics", "/metrics/engines"):
        assert (await client.get(path, headers=elsewhere)).status == 200
        assert (await client.get(path, headers=rebound)).status == 403
    assert (await client.get("/sgl_ext/workers", headers=elsewhere)).status == 403
