"""What the operator of an engine relies on: who can reach it, a flush under load, a dead child."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.protocols.request_ids import new_trace_id
from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.otlp_collector import Collector, collecting
from tests.waiting import HANG_S, until

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
ENDLESS = {"text": "go on", "sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "engine.log"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def engine(nursery: Nursery, tiny_model: Path, log: Path, collector: Collector) -> Iterator[Engine]:
    """An engine that logs its requests, and exports the spans of those that are sampled."""
    flags = ["--max-total-tokens", "200000", "--log-requests", "--log-requests-level", "0"]
    flags += ["--enable-trace", "--otlp-traces-endpoint", f"{collector.url}/v1/traces"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        with running_engine(nursery, tiny_model, log, *flags) as started:
            yield started


def processes_of(engine: Engine) -> list[psutil.Process]:
    first = psutil.Process(engine.server.pid)
    return [first, *first.children(recursive=True)]


SAMPLING = {"max_new_tokens": 2}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "model": "tiny", "max_tokens": 2}
NAMED: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": ("/v1/chat/completions", HELLO, 1),
    "messages": ("/v1/messages", HELLO, 1),
    "responses": ("/v1/responses", {"input": "Hi", "model": "tiny", "max_output_tokens": 2}, 1),
    "batch": ("/generate", {"text": ["a", "b"], "sampling_params": SAMPLING}, 2),
    "samples": ("/v1/chat/completions", {**HELLO, "n": 2}, 2),
}


@pytest.mark.parametrize("name", NAMED)
def test_an_engines_log_names_requests_by_their_ids(engine: Engine, log: Path, name: str) -> None:
    path, body, count = NAMED[name]
    headers = {"x-request-id": f"my-{name}", "traceparent": UNSAMPLED}
    assert requests.post(f"{engine.url}{path}", json=body, headers=headers, timeout=HANG_S).ok
    finished = re.compile(rf"Finish: .*rid='(~my-{name}~[0-9a-f]{{24}})'")
    until(lambda: len(set(finished.findall(log.read_text()))) >= count)


def test_an_engines_errors_name_the_id_too(engine: Engine) -> None:
    headers = {"x-request-id": "wrong"}
    body = {**HELLO, "messages": 7}
    refused = requests.post(f"{engine.url}/v1/messages", json=body, headers=headers, timeout=HANG_S)
    assert refused.headers["request-id"] == refused.json()["request_id"] == "wrong"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_engines_spans_belong_to_the_trace_of_the_request(
    engine: Engine, collector: Collector, path: str
) -> None:
    trace = new_trace_id()
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    assert requests.post(f"{engine.url}{path}", json=HELLO, headers=headers, timeout=HANG_S).ok

    def parents() -> set[str]:
        ours = [span for span in collector.spans if span.trace_id.hex() == trace]
        return {span.parent_span_id.hex() for span in ours}

    until(lambda: "b7ad6b7169203331" in parents() and len(parents()) > 1)


def test_an_engine_of_one_node_listens_on_loopback_alone(engine: Engine) -> None:
    listening = {
        connection.laddr.ip
        for process in processes_of(engine)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert all(ip_address(address).is_loopback for address in listening), listening


def test_a_flush_under_load_is_409_and_names_what_is_pending(engine: Engine) -> None:
    flush = f"{engine.url}/flush_cache"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.post, "/generate", {**ENDLESS, "rid": "endless"})
        engine.gate.until(lambda step: step.answered("endless") > 0)
        refused = requests.post(flush, params={"timeout": 0}, timeout=HANG_S)
        requests.post(f"{engine.url}/abort_request", json={"rid": "endless"}, timeout=HANG_S)
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert (error["pending"], error["requests"]) == (1, ["endless"])
    assert "pending requests: 1" in error["message"]
    assert requests.post(flush, timeout=HANG_S).ok


@pytest.mark.parametrize("timeout", ["-1", "61", "nan", "soon"])
def test_a_flush_waits_no_longer_than_its_limit(engine: Engine, timeout: str) -> None:
    refused = requests.post(
        f"{engine.url}/flush_cache", params={"timeout": timeout}, timeout=HANG_S
    )
    assert refused.status_code == 400
    assert "timeout" in refused.json()["error"]["message"]


def test_a_tenant_neither_takes_nor_aborts_the_names_of_another(engine: Engine) -> None:
    """SGLang aborts every request whose name begins with that of one whose client left."""
    generate = f"{engine.url}/generate"
    sampling = {"max_new_tokens": 400, "ignore_eos": True}

    def ask(tenant: str, rid: str, **more: Any) -> requests.Response:
        body = {"text": "go on", "rid": rid, "sampling_params": sampling, **more}
        headers = {"x-tenant-id": tenant} if tenant else None
        return requests.post(generate, json=body, headers=headers, timeout=HANG_S, stream=True)

    with ThreadPoolExecutor(2) as pool:
        with engine.gate.closed():
            first = pool.submit(lambda: ask("a", "10").json()["meta_info"])
            engine.gate.answer("~1:a:10")
            for name in ("10", "1"):
                at, other = engine.gate.mark(), f"~1:b:{name}"
                asked = pool.submit(ask, "b", name, stream=True)
                engine.gate.answer(other)
                with asked.result() as answer:
                    assert answer.status_code == 200
                    assert next(answer.iter_lines())
                engine.gate.arrived("AbortReq", since=at)
                engine.gate.finish(other)
        meta = first.result()
    assert (meta["id"], meta["finish_reason"]) == ("~1:a:10", {"type": "length", "length": 400})
    refused = ask("", "~1:a:10")
    assert refused.status_code == 400
    assert "rid" in refused.text


def test_the_event_loop_of_the_http_process_reports_its_stalls(engine: Engine) -> None:
    page = requests.get(f"{engine.url}/metrics", timeout=HANG_S).text
    assert 'sgl_ext_event_loop_stall_seconds_total{clock="cpu"' in page


def test_an_engine_whose_scheduler_is_stopped_says_so(engine: Engine) -> None:
    def ready() -> int:
        return requests.get(f"{engine.url}/ready", timeout=HANG_S).status_code

    assert ready() == 200
    scheduler = max(processes_of(engine)[1:], key=lambda process: process.memory_info().rss)
    scheduler.suspend()
    try:
        until(lambda: ready() == 504)
    finally:
        scheduler.resume()
    until(lambda: ready() == 200)
    engine.ask("It goes on")


def test_an_engine_whose_detokenizer_dies_ends_without_dumping_its_memory(
    engine: Engine, log: Path
) -> None:
    """A dump keeps it from ending, and from answering, for 65 s."""
    # SGLang starts it last, and a process that is forked has no title.
    detokenizer = max(processes_of(engine), key=lambda process: process.create_time())
    engine.ask("Hello")  # from the first request on, a dump is possible
    detokenizer.kill()
    until(lambda: not engine.server.running())
    assert "It usually means one child failed" in log.read_text()
    assert "crash diagnostics" not in log.read_text()
