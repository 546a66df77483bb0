"""A fleet of real engines on a Ray cluster: three nodes on this machine, and load all the time.

One cluster and one launcher for all tests, which are the chapters of one life.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.node import FORKING, ROOT, free_port, running_process
from sgl_ext_cpu.nursery import Nursery

from tests.waiting import HANG_S, until

pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.slow]

SECRET = "a-secret-of-engines-and-balancer"
# A dead node is seen after 5 s; Ray's default is 15 s.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}


class Load:
    """Clients that stream one answer after another.

    outcomes: of the requests so far. lost: before a byte; cut: after it.
    """

    def __init__(self, url: str, clients: int = 4) -> None:
        self.outcomes: Counter[str] = Counter()
        self.examples: list[str] = []
        self._url = f"{url}/v1/messages"
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._ended.is_set():
            turn += 1
            outcome = self._ask(f"agent {number}, turn {turn}. " * 20)
            self.outcomes[outcome] += 1

    def _ask(self, text: str) -> str:
        body = {"model": "m", "max_tokens": 40, "stream": True}
        body["messages"] = [{"role": "user", "content": text}]
        lines: list[bytes] = []
        try:
            with requests.post(self._url, json=body, stream=True, timeout=HANG_S) as answer:
                lines += [answer.reason.encode()] if not answer.ok else []
                lines += filter(None, answer.iter_lines())
                began, whole = answer.ok, b"message_stop" in lines[-1]
        except requests.RequestException as error:
            began, whole = bool(lines), False
            lines.append(repr(error).encode())
        if not whole:
            self.examples.append(repr(lines[-3:]))
        return "whole" if whole else "cut" if began else "lost"


class Fleet:
    """The launcher's process, its balancer's address, and the cluster below."""

    def __init__(self, cluster: Any, address: str, url: str, launcher: Any, logs: Path) -> None:
        self.cluster = cluster
        self.address = address
        self.url = url
        self.launcher = launcher
        self.logs = logs

    def workers(self) -> dict[str, bool]:
        """The engines that the balancer knows, and whether they are ready."""
        workers = requests.get(f"{self.url}/health", timeout=HANG_S).json()["workers"]
        return {worker["id"]: worker["ready"] for worker in workers}

    def serve(self, count: int) -> bool:
        workers = self.workers()
        return len(workers) == count and all(workers.values())

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sgl_ext.fleet", "--ray-address", self.address, *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Load that runs before the block begins, and for some time after it."""
        with Load(self.url) as load:
            until(lambda: load.outcomes["whole"] >= 4)
            yield load
            reached = load.outcomes["whole"]
            until(lambda: load.outcomes["whole"] >= reached + 8)


@pytest.fixture(scope="module")
def fleet(
    tiny_model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    from ray.cluster_utils import Cluster

    logs = tmp_path_factory.mktemp("fleet")
    own = {
        **FORKING,
        **nursery.environment,
        "SGLANG_PLATFORM": "sgl_ext_cpu",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SECRET": SECRET,
        "RAY_health_check_period_ms": "1000",
    }
    own["PYTHONPATH"] = os.pathsep.join((own["PYTHONPATH"], str(ROOT)))
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        head = {**NODE, "num_cpus": 0, "_system_config": QUICK}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        for _ in range(2):
            cluster.add_node(num_cpus=1, **NODE)
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "sgl_ext.launch",
            "--config",
            str(ROOT / "launch/cpu.toml"),
        ]
        command += ["--model-path", str(tiny_model), "--port", str(port), "--log-dir", str(logs)]
        command += ["--ray-address", cluster.address, "--engine-secret", "env:SECRET"]
        command += ["--instances", "2", "--max-total-tokens", "20000"]
        output = logs / "launch.out"

        def serving() -> bool:
            return "sgl-ext is serving" in output.read_text()

        launcher = stack.enter_context(running_process(command, output, serving))
        yield Fleet(cluster, cluster.address, f"http://127.0.0.1:{port}", launcher, logs)


def test_the_engines_are_on_two_nodes_and_answer_their_balancer_alone(fleet: Fleet) -> None:
    assert fleet.serve(2)
    shown = fleet.command("show").stdout
    assert "wanted: 2 engines of generation 0" in shown
    assert shown.count(": ready at http://") == 2
    url = shown.split(": ready at ")[1].split(",")[0]
    assert requests.get(f"{url}/v1/models", timeout=HANG_S).status_code == 401
    with fleet.load() as load:
        pass
    assert load.outcomes["whole"] == load.outcomes.total(), load.examples


def test_a_second_launcher_and_engines_that_do_not_fit_are_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    def launch(fleet_name: str, *flags: str) -> str:
        """What a launcher says that does not start."""
        command = [sys.executable, "-m", "sgl_ext.launch", "--model-path", "m", *flags]
        command += ["--port", str(free_port()), "--log-dir", str(tmp_path / fleet_name)]
        command += ["--ray-address", fleet.address, "--ray-fleet", fleet_name]
        command += ["--engine-secret", "env:SECRET"]
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 1
        return ended.stderr

    with ThreadPoolExecutor(4) as pool:
        again, large = pool.submit(launch, "sgl-ext"), pool.submit(launch, "large", "--tp", "4")
        scaled, stopped = fleet.command("scale", "7"), fleet.command("stop")
    assert "a launcher keeps this fleet already" in again.result()
    error = large.result()
    start = "sgl-ext serve: 1 more engines need 4 CPUs on one node each, 4 CPUs in all"
    assert error.startswith(start)
    assert "has 0 of 1 free" in error
    assert "5 more engines need 1 CPU on one node each" in scaled.stderr
    assert "keeps it: stop that launcher" in stopped.stderr
    assert "wanted: 2 engines" in fleet.command("show").stdout
    assert fleet.serve(2)


def test_a_rolling_restart_loses_and_cuts_nothing(fleet: Fleet) -> None:
    before = fleet.workers()
    with fleet.load() as load:
        done = fleet.command("restart")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("draining") == 2
        until(lambda: fleet.serve(2))
    assert load.outcomes["whole"] == load.outcomes.total(), load.examples
    assert not before.keys() & fleet.workers().keys()


def test_a_killed_node_loses_nothing_and_its_engine_comes_back_on_another(fleet: Fleet) -> None:
    before = fleet.workers()
    with fleet.load() as load:
        node = fleet.cluster.worker_nodes.copy().pop()
        raylet = next(p for kind, ps in node.all_processes.items() if kind == "raylet" for p in ps)
        dying = psutil.Process(raylet.process.pid)
        for process in [*dying.children(recursive=True), dying]:
            process.kill()
        fleet.cluster.remove_node(node, allow_graceful=False)
        until(lambda: sum(fleet.workers().values()) == 1)
        fleet.cluster.add_node(num_cpus=1, **NODE)
        until(lambda: fleet.serve(2))
    # Those that had begun on the killed node end with an error event.
    assert load.outcomes["lost"] == 0, load.examples
    assert load.outcomes["cut"] <= 4, load.examples
    assert len(before.keys() & fleet.workers().keys()) == 1


def test_an_engine_that_leaves_finishes_its_requests(fleet: Fleet) -> None:
    with fleet.load() as load:
        done = fleet.command("scale", "1")
        assert done.returncode == 0, done.stderr
        until(lambda: fleet.serve(1))
    assert load.outcomes["whole"] == load.outcomes.total(), load.examples
    assert next(iter(fleet.workers())).startswith("engine-0-")


def test_sigterm_ends_the_engines_and_leaves_nothing(fleet: Fleet) -> None:
    engines = [process for process in psutil.process_iter() if _is_own(process)]
    assert engines
    fleet.launcher.send_signal(signal.SIGTERM)
    assert fleet.launcher.wait(timeout=HANG_S) == 0
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert alive == []
    shown = fleet.command("show")
    assert "there is no fleet 'sgl-ext'" in shown.stderr
    assert "all engines have ended" in (fleet.logs / "fleet.log").read_text()


def _is_own(process: psutil.Process) -> bool:
    """Whether it is an engine of this fleet."""
    try:
        is_engine = "sgl_ext.engine.serve" in process.cmdline()
        return is_engine and process.environ().get("SGLEXT_ENGINE_SECRET") == SECRET
    except psutil.Error:
        return False
