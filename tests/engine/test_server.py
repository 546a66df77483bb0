"""What the operator of an engine relies on: who can reach it, a flush under load, a dead child."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.waiting import until

ENDLESS = {"text": "go on", "sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "engine.log"


@pytest.fixture(scope="module")
def engine(nursery: Nursery, tiny_model: Path, log: Path) -> Iterator[Engine]:
    with running_engine(nursery, tiny_model, log, "--max-total-tokens", "200000") as started:
        yield started


def processes_of(engine: Engine) -> list[psutil.Process]:
    first = psutil.Process(engine.server.pid)
    return [first, *first.children(recursive=True)]


def has_running(engine: Engine, number: int) -> bool:
    loads = requests.get(f"{engine.url}/v1/loads", timeout=60).json()["loads"]
    return bool(loads[0]["num_running_reqs"] == number)


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
        until(lambda: has_running(engine, 1))
        refused = requests.post(flush, params={"timeout": 0}, timeout=60)
        requests.post(f"{engine.url}/abort_request", json={"rid": "endless"}, timeout=60)
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert (error["pending"], error["requests"]) == (1, ["endless"])
    assert "pending requests: 1" in error["message"]
    assert requests.post(flush, timeout=60).ok


@pytest.mark.parametrize("timeout", ["-1", "61", "nan", "soon"])
def test_a_flush_waits_no_longer_than_its_limit(engine: Engine, timeout: str) -> None:
    refused = requests.post(f"{engine.url}/flush_cache", params={"timeout": timeout}, timeout=60)
    assert refused.status_code == 400
    assert "timeout" in refused.json()["error"]["message"]


def test_a_tenant_neither_takes_nor_aborts_the_names_of_another(engine: Engine) -> None:
    """SGLang aborts every request whose name begins with that of one whose client left."""
    generate = f"{engine.url}/generate"
    sampling = {"max_new_tokens": 400, "ignore_eos": True}

    def ask(tenant: str, rid: str, **more: Any) -> requests.Response:
        body = {"text": "go on", "rid": rid, "sampling_params": sampling, **more}
        headers = {"x-tenant-id": tenant} if tenant else None
        return requests.post(generate, json=body, headers=headers, timeout=60, stream=True)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: ask("a", "10").json()["meta_info"])
        until(lambda: has_running(engine, 1))
        for name in ("10", "1"):
            with ask("b", name, stream=True) as answer:
                assert answer.status_code == 200
                assert next(answer.iter_lines())
        meta = first.result()
    assert (meta["id"], meta["finish_reason"]) == ("~1:a:10", {"type": "length", "length": 400})
    refused = ask("", "~1:a:10")
    assert refused.status_code == 400
    assert "rid" in refused.text


def test_the_event_loop_of_the_http_process_reports_its_stalls(engine: Engine) -> None:
    page = requests.get(f"{engine.url}/metrics", timeout=30).text
    assert 'sgl_ext_event_loop_stall_seconds_total{clock="cpu"' in page


def test_an_engine_whose_scheduler_is_stopped_says_so(engine: Engine) -> None:
    def ready() -> int:
        return requests.get(f"{engine.url}/ready", timeout=30).status_code

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
