"""The spans of requests reach a collector, and no collector delays a request."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting import spans
from sgl_ext.balancer.reporting.spans import (
    Kind,
    Span,
    SpanExport,
    check_export,
)
from sgl_ext.protocols.request_ids import read_trace
from sgl_ext.settings.schema import BalancerSettings, SettingsError
from sgl_ext.settings.sources import balancer_settings
from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import until
from tests.otlp_collector import Collector, collecting, values
from tests.waiting import HANG_S

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SECRET = "a word of the prompt"
SAID = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
TRACE, PARENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 7,
    "total_tokens": 57,
    "prompt_tokens_details": {"cached_tokens": 40},
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Waits for the exporters of a test, which would log in the next one."""
    yield
    for thread in threading.enumerate():
        if thread.name == "spans":
            thread.join(HANG_S)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(spans, "_EVERY_S", 0.01)
    with collecting() as made:
        yield made


async def started(
    start: Start, collector: Collector, *engines: Engine, **config: Any
) -> ClientSession:
    return await start(*engines, otlp_endpoint=collector.url, **config)


async def until_spans(collector: Collector, count: int) -> None:
    async def are_there() -> bool:
        await asyncio.sleep(0.005)
        return len(collector.spans) >= count

    await until(are_there)


async def test_one_trace_holds_the_clients_span_ours_and_the_engines(
    start: Start, collector: Collector
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"usage": USAGE})

    engine = Engine("a", answer)
    client = await started(start, collector, engine)
    parent = {"traceparent": f"00-{TRACE}-{PARENT_SPAN}-01", "tracestate": "a=1"}
    headers = {**parent, "x-request-id": "mine", "x-tenant-id": "team"}
    assert (await client.post(CHAT, json=SAID, headers=headers)).status == 200
    await until_spans(collector, 5)
    request = collector.named(f"POST {CHAT}")
    upstream, first = collector.named("upstream"), collector.named("first token")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert request.parent_span_id.hex() == PARENT_SPAN
    for span in (collector.named("read"), collector.named("place"), upstream):
        assert span.parent_span_id == request.span_id
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
    assert first.parent_span_id == upstream.span_id
    assert (request.kind, upstream.kind) == (2, 3)  # server, client
    sent = engine.seen[0][2]
    handed = read_trace(sent["traceparent"], sent["tracestate"])
    assert handed is not None
    assert (handed.trace_id, handed.span_id) == (TRACE, upstream.span_id.hex())
    assert (handed.is_sampled, handed.state) == (True, "a=1")
    about = values(request.attributes)
    assert (
        about.items()
        >= {
            "http.request.method": "POST",
            "http.route": CHAT,
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": 50,
            "gen_ai.usage.output_tokens": 7,
            "gen_ai.usage.cache_read.input_tokens": 40,
            "sgl_ext.request.id": "mine",
            "sgl_ext.outcome": "complete",
            "sgl_ext.tenant": "team",
        }.items()
    )
    assert values(collector.named("place").attributes)["sgl_ext.placement.reason"] == "new"
    assert collector.resources[0]["service.name"] == "sgl-ext"
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_a_retry_is_a_second_attempt_of_the_same_request(
    start: Start, collector: Collector
) -> None:
    async def cut_once(request: web.Request) -> web.StreamResponse:
        if sum(len(engine.seen) for engine in engines) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.Response()

    engines = [Engine("a", cut_once), Engine("b", cut_once)]
    client = await started(start, collector, *engines)
    assert (await client.post(CHAT, json=SAID)).status == 200
    await until_spans(collector, 7)
    first, second = sorted(
        (span for span in collector.spans if span.name == "upstream"),
        key=lambda span: span.start_time_unix_nano,
    )
    assert first.status.code == 2
    assert values(second.attributes)["http.request.resend_count"] == 1
    assert collector.named(f"POST {CHAT}").status.code == 0


async def test_a_rejected_request_is_a_failed_span(start: Start, collector: Collector) -> None:
    client = await started(start, collector)
    assert (await client.post(MESSAGES, json=SAID)).status == 529
    await until_spans(collector, 2)
    request = collector.named(f"POST {MESSAGES}")
    assert request.status.message == "No engine is ready."
    assert values(request.attributes)["error.type"] == "529"


async def test_a_queued_request_has_a_span_for_its_wait(start: Start, collector: Collector) -> None:
    release = asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({})

    engine = Engine("a", slow)
    client = await started(start, collector, engine, max_in_flight=1)

    async def is_queued() -> bool:
        return "sgl_ext_queued_requests 1.0" in await (await client.get("/metrics")).text()

    async with asyncio.TaskGroup() as group:
        for text in ("one", "two"):
            said = {"messages": [{"role": "user", "content": text}]}
            group.create_task(client.post(CHAT, json=said))
        await until(is_queued)
        release.set()
    await until_spans(collector, 11)
    assert values(collector.named("queue").attributes) == {"sgl_ext.wait.reason": "capacity"}


async def test_unsampled_traces_are_handed_on_and_not_exported(
    start: Start, collector: Collector
) -> None:
    engine = Engine("a")
    client = await started(start, collector, engine, trace_share=0.0)
    await client.post(CHAT, json=SAID)
    unsampled = f"00-{TRACE}-{PARENT_SPAN}-00"
    await client.post(CHAT, json=SAID, headers={"traceparent": unsampled})
    await client.post(CHAT, json=SAID, headers={"traceparent": unsampled[:-1] + "1"})
    await until_spans(collector, 5)
    made, theirs, sampled = [sent["traceparent"] for _, _, sent in engine.seen]
    assert made.endswith("-00")
    assert theirs == unsampled
    assert sampled.endswith("-01")
    assert len(collector.spans) == 5


async def test_a_collector_that_hangs_delays_no_request(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MOST_WAITING", 12)
    collector.gate.clear()
    client = await started(start, collector, Engine("a"))
    assert (await client.post(CHAT, json=SAID)).status == 200
    assert await asyncio.to_thread(collector.is_asked.wait, HANG_S)
    for _ in range(4):  # 20 spans, of which 10 fit
        assert (await client.post(CHAT, json=SAID)).status == 200
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_spans_total{result="dropped"} 10.0' in page


async def test_spans_that_the_collector_refuses_are_counted_and_an_outage_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "_EVERY_S", 0.0)
    answers = iter([False, False, True, True])

    class Flaky:
        def export(self, spans: list[Span]) -> bool:
            return next(answers)

        def shutdown(self) -> None:
            pass

    metrics = Metrics()
    export = SpanExport(Flaky, metrics, 1.0)
    span = Span(TRACE, PARENT_SPAN, "", "x", Kind.INTERNAL, 1, 2, {})
    request: Any = SimpleNamespace(end=lambda *_: [span])
    ended: Any = None

    with caplog.at_level("INFO"):
        for number in range(1, 5):
            export.add(request, ended)

            async def is_counted(number: int = number) -> bool:
                await asyncio.sleep(0)
                return sum(metrics.spans.counts.values()) == number

            await until(is_counted)
    await export.close()
    assert metrics.spans.counts[("failed",)] == metrics.spans.counts[("exported",)] == 2
    logged = [record.message for record in caplog.records]
    assert [line.split()[0] for line in logged if "collector" in line] == ["spans", "the"]


def test_without_a_collector_nothing_is_imported_or_started() -> None:
    code = (
        "import sys, sgl_ext.balancer.serve as serve; "
        "from sgl_ext.balancer.reporting.spans import open_export; "
        "assert open_export(serve.BalancerSettings(), None) is None; "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=clean)


@pytest.mark.parametrize("url", ["collector:4318", "grpc://x:1", "http://", "http://x:999999"])
def test_a_wrong_endpoint_is_rejected(url: str) -> None:
    with pytest.raises(SettingsError, match=r"otlp-endpoint=.*must be http\[s\]://HOST:PORT"):
        balancer_settings(["--worker", "http://127.0.0.1:1", "--otlp-endpoint", url])


def test_opentelemetrys_variables_name_a_collector_too() -> None:
    settings, there = BalancerSettings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    assert not check_export(settings, {})
    assert check_export(settings, there)
    assert not check_export(settings, {**there, "OTEL_SDK_DISABLED": "true"})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_PACKAGES", ("opentelemetry.nothing",))
    with pytest.raises(SettingsError, match=r"pip install 'sgl-ext\[otel\]'"):
        check_export(BalancerSettings(otlp_endpoint="http://x:4318"))
    assert not check_export(BalancerSettings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"})
