"""One engine of two ranks on this machine, as one node or as two, with all of SGLang's own checks.

The ranks of two "nodes" have nothing in common but their network: each node is a process of its
own, with its own folder and environment, as on two machines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from sgl_ext_cpu.node import FORKING, free_port, running_process

CHECKS = {
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
"""SGLang compares what its ranks do, and ends them where they differ; it counts its memory in each
iteration."""
DIVERGED = "Found rank divergence"
"""What SGLang logs before it ends ranks that differ."""
_FLAGS = (
    *("--host", "127.0.0.1", "--served-model-name", "tiny", "--max-running-requests", "16"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--skip-server-warmup", "--sleep-on-idle", "--enable-metrics", "--enable-cache-report"),
    *("--log-level-http", "warning"),
)


@dataclass(frozen=True)
class Ranks:
    """An engine. url: of its first node. logs: of its nodes."""

    url: str
    logs: Sequence[Path]

    def divergences(self) -> int:
        """How many ranks have found that others decided differently."""
        return sum(log.read_text(errors="replace").count(DIVERGED) for log in self.logs)


@contextmanager
def running_ranks(
    model: Path,
    log_dir: Path,
    *flags: str,
    nodes: int = 1,
    pipeline: bool = False,
    module: str = "sgl_ext.engine.serve",
    environments: Sequence[Mapping[str, str]] = ({}, {}),
) -> Iterator[Ranks]:
    """Starts the nodes, yields once the first serves, and ends them.

    pipeline: the ranks are stages of a pipeline, not parts of a tensor.
    environments: what each node has in addition to this process's variables.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in range(nodes)]
    logs = [log_dir / f"node-{number}.log" for number in range(nodes)]
    command = [sys.executable, "-m", module, "--model-path", os.fspath(model), *_FLAGS]
    command += ["--pp-size" if pipeline else "--tp-size", "2", *flags]
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    url = f"http://127.0.0.1:{ports[0]}"
    with ExitStack() as stack:
        for number in reversed(range(nodes)):  # the first is ready last
            own = ["--node-rank", str(number)] if nodes > 1 else []
            # A node counts its devices from 0.
            cores = {"SGLANG_CPU_OMP_THREADS_BIND": "1|0" if number else "0|1"}
            started = (lambda: _serves(url)) if number == 0 else (lambda: True)
            stack.enter_context(
                running_process(
                    [*command, "--port", str(ports[number]), *own],
                    logs[number],
                    started,
                    environment={
                        "SGLANG_PLATFORM": "sgl_ext_cpu",
                        # In what it forks, SGLang's checks would be off: they are made by imports.
                        "SGLEXT_CPU_NURSERY": "",
                        **FORKING,
                        **cores,
                        **CHECKS,
                        **environments[number],
                    },
                )
            )
        yield Ranks(url, logs)


def _serves(url: str) -> bool:
    try:
        return requests.get(f"{url}/v1/models", timeout=5).ok
    except requests.RequestException:
        time.sleep(0.5)  # leaves the cores to the engine
        return False
