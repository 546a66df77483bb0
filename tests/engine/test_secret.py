"""Engines beyond loopback: real ones, and clients and a balancer on what is another machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.gate import Gate
from sgl_ext_cpu.node import free_port
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.headers import SECRET_HEADER
from tests.engine.scheduler.test_event_publisher import Engine
from tests.namespaces import HERE, Namespace, fetch, joined_namespace
from tests.waiting import HANG_S, until

SECRET = "0123456789abcdef-secret"
KNOWN = {SECRET_HEADER: SECRET}
LONG = "a prompt that is long enough to be found in the cache again. " * 8


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Namespace, str]]:
    """Another machine, as far as the network shows; or this one, and why there is no other."""
    with ExitStack() as stack:
        try:
            made, why = stack.enter_context(joined_namespace()), ""
        except pytest.skip.Exception as skipped:
            made, why = HERE, str(skipped)
        yield made, why


@pytest.fixture(scope="module")
def elsewhere(place: tuple[Namespace, str]) -> Namespace:
    return place[0]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "engine.secret"
    path.write_text(SECRET)
    return path


@contextmanager
def running(
    nursery: Nursery, model: Path, log: Path, host: str, module: str, settings: EngineSettings
) -> Iterator[Engine]:
    """An engine that SGLang warms up itself, over HTTP, and that listens on `host`."""
    port = free_port()
    flags = ["--model-path", str(model), "--served-model-name", "tiny", "--host", host]
    flags += ["--port", str(port), "--max-total-tokens", "8192", "--max-running-requests", "8"]
    flags += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    flags += ["--enable-cache-report", "--enable-metrics", "--sleep-on-idle"]
    with Gate() as gate:
        environ = {**os.environ, **settings.to_environment(), **gate.environment}
        server = nursery.start(flags, log, module, environ)
        try:
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            engine = Engine(url, server, gate)
            until(lambda: not server.running() or status_of(f"{url}/ready") == 200, 600)
            assert server.running(), log.read_text()
            yield engine
        finally:
            server.stop()


def status_of(url: str) -> int:
    try:
        return requests.get(url, timeout=HANG_S).status_code
    except requests.ConnectionError:
        return 0


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, elsewhere: Namespace, secret: Path
) -> Iterator[Engine]:
    settings = EngineSettings(engine_secret=f"file:{secret}")
    log, serve = secret.with_name("engine.log"), "sgl_ext.engine.serve"
    host = "0.0.0.0" if elsewhere is HERE else elsewhere.address
    with running(nursery, tiny_model, log, host, serve, settings) as started:
        yield started


def port_of(engine: Engine) -> int:
    return int(engine.url.rpartition(":")[2])


def generate(group: str) -> tuple[str, dict[str, str]]:
    """A request of a cache group: its body and its headers."""
    body = {"text": LONG, "sampling_params": {"max_new_tokens": 1}}
    return json.dumps(body), {"content-type": "application/json", "x-sgl-ext-cache-group": group}


def cached(answer: str) -> int:
    return int(json.loads(answer)["meta_info"]["cached_tokens"])


def test_only_its_http_port_is_reached_from_other_machines(engine: Engine) -> None:
    first = psutil.Process(engine.server.pid)
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in (first, *first.children(recursive=True))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    beyond = {port for address, port in listening if not ip_address(address).is_loopback}
    assert beyond == {port_of(engine)}, listening


def test_the_clients_here_have_a_loopback_address_of_their_own(
    engine: Engine, place: tuple[Namespace, str]
) -> None:
    elsewhere, why = place
    if why:
        pytest.skip(f"the clients of these tests are on this machine: {why}")
    assert fetch(elsewhere, "127.0.0.1", port_of(engine), "GET", "/ready")[0] == 0
    assert fetch(elsewhere, elsewhere.address, port_of(engine), "GET", "/ready")[0] == 200


def test_the_secret_decides_what_is_answered_and_believed(
    engine: Engine, elsewhere: Namespace
) -> None:
    def ask(method: str, path: str, headers: dict[str, str], body: str | None = None) -> Any:
        return fetch(elsewhere, elsewhere.address, port_of(engine), method, path, headers, body)

    assert ask("GET", "/ready", {})[0] == 200
    body, of_group = generate("one")
    for headers in (of_group, {**of_group, SECRET_HEADER: "wrong"}):
        assert ask("POST", "/generate", headers, body)[0] == 401
    for path in ("/sgl_ext/events", "/v1/pins", "/metrics", "/server_info"):
        assert ask("GET", path, {})[0] == 401
    assert ask("POST", "/flush_cache", {})[0] == 401
    # Nothing of a refused request came into the cache, and one group reads nothing of another.
    assert cached(ask("POST", "/generate", of_group | KNOWN, body)[2]) == 0
    assert cached(ask("POST", "/generate", of_group | KNOWN, body)[2]) > 0
    body, of_another = generate("another")
    status, headers, answer = ask("POST", "/generate", of_another | KNOWN, body)
    assert (status, cached(answer)) == (200, 0)
    assert SECRET not in f"{headers}{answer}"
    assert 'sgl_ext_requests_refused_total{reason="wrong"} 1.0' in ask("GET", "/metrics", KNOWN)[2]


def test_its_log_does_not_show_the_secret(engine: Engine, secret: Path) -> None:
    assert SECRET not in secret.with_name("engine.log").read_text()


@contextmanager
def balancer(inside: Namespace, engine: Engine, log: Path, *flags: str) -> Iterator[int]:
    """A balancer in another namespace, in front of the engine; its port there."""
    port = free_port()
    command = [sys.executable, "-m", "sgl_ext.balancer.serve", "--port", str(port)]
    command += ["--worker", engine.url, "--store-limit-bytes", "0", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(inside.command(*command), stdout=output, stderr=output)
    try:
        until(lambda: fetch(inside, "127.0.0.1", port, "GET", "/live")[0] == 200)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=HANG_S)


def worker_of(inside: Namespace, port: int) -> dict[str, Any]:
    """The only worker, as a balancer tells of it."""
    shown = fetch(inside, "127.0.0.1", port, "GET", "/sgl_ext/workers")[2]
    (worker,) = json.loads(shown)["workers"]
    return dict(worker)


def test_a_balancer_on_another_machine_serves_with_the_secret(
    engine: Engine, elsewhere: Namespace, secret: Path, tmp_path: Path
) -> None:
    log = tmp_path / "balancer.log"
    with balancer(elsewhere, engine, log, "--engine-secret", f"file:{secret}") as port:
        body, headers = generate("one")
        sent = {**headers, SECRET_HEADER: "a client's own"}
        until(lambda: fetch(elsewhere, "127.0.0.1", port, "GET", "/health")[0] == 200)
        status, answered, answer = fetch(
            elsewhere, "127.0.0.1", port, "POST", "/generate", sent, body
        )
        assert status == 200, answer
        assert SECRET not in f"{answered}{answer}"
        until(lambda: worker_of(elsewhere, port)["publishes_prefixes"])
    assert SECRET not in log.read_text()


def test_a_balancer_without_the_secret_uses_no_engine_and_says_why(
    engine: Engine, elsewhere: Namespace, tmp_path: Path
) -> None:
    log = tmp_path / "balancer.log"
    with balancer(elsewhere, engine, log) as port:
        body, headers = generate("one")
        assert fetch(elsewhere, "127.0.0.1", port, "POST", "/generate", headers, body)[0] == 503
        until(lambda: "refuses the engine-secret" in (worker_of(elsewhere, port)["fault"] or ""))
        worker = worker_of(elsewhere, port)
        assert (worker["ready"], worker["breaker"]) == (False, "closed")
    assert log.read_text().count("refuses the engine-secret") == 1


def test_sglangs_own_server_beyond_loopback_serves_and_believes_nobody(
    nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> None:
    log, module = tmp_path / "engine.log", "sglang.launch_server"
    settings = EngineSettings()
    with running(nursery, tiny_model, log, "0.0.0.0", module, settings) as plain:
        for group, is_cached in (("one", False), ("another", True)):
            body, headers = generate(group)
            answer = requests.post(f"{plain.url}/generate", body, headers=headers, timeout=HANG_S)
            assert (cached(answer.text) > 0) is is_cached
        assert requests.get(f"{plain.url}/sgl_ext/events", timeout=HANG_S).status_code == 401
    assert "believes no header of a balancer" in log.read_text()
