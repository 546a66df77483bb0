"""Engines on this machine's GPU, in place of those that a nursery forks: `make test-gpu`.

They compute with kernels that give a prompt the same answer in any batch, as the tests compare
answers. A first start compiles kernels, which takes minutes: `make gpu-report` does it, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

MODEL = "small-config"
"""The local model: head sizes that GPU kernels have, and weights that the engine draws."""
FLAGS = ("--load-format", "dummy", "--enable-deterministic-inference")
_CPU_FLAGS = {"--cuda-graph-backend-decode": 2, "--cuda-graph-backend-prefill": 2}
_CPU_FLAGS |= {"--sleep-on-idle": 1, "--skip-server-warmup": 1}
_ENVIRONMENT = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sgl_ext_cpu.models",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
# The platform of tests on the CPU, what it sets, and cores of ranks.
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SGLANG_PLATFORM")
_HIDDEN += ("SGLANG_CPU_OMP_THREADS_BIND",)
_SEEN = "from torch.cuda import *; print(device_count(), get_device_capability()[0])"
_BLACKWELL = 10  # the major number of its compute capability


class GpuServer:
    """A server as its own process group. The attributes are those of a nursery's `Server`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def exit_status(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        if self.running():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class GpuEngines:
    """Starts engines. visible: the CUDA devices that tests may use; None: all."""

    def __init__(self, visible: str | None) -> None:
        self._visible = visible
        self.count, self._generation = self._seen()

    def start(
        self,
        flags: Sequence[str],
        log: Path,
        module: str = "sglang.launch_server",
        environment: Mapping[str, str] | None = None,
    ) -> GpuServer:
        """Starts a server: `python -m module flags`, its output in `log`."""
        if "--tp-size" in flags and self.count < int(flags[flags.index("--tp-size") + 1]):
            pytest.skip(f"needs more GPUs than {self.count}")
        whole = self._environment({**os.environ, **(environment or {})})
        given = [*without(flags, _CPU_FLAGS), *FLAGS]
        if self._generation >= _BLACKWELL:
            # Of the deterministic ones, only this one works with a radix cache.
            given += ["--attention-backend", "triton"]
        return GpuServer([sys.executable, "-m", module, *given], log, whole)

    def _environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        found = {name: value for name, value in environ.items() if name not in _HIDDEN}
        if self._visible is not None:
            found["CUDA_VISIBLE_DEVICES"] = self._visible
        return found | _ENVIRONMENT

    def _seen(self) -> tuple[int, int]:
        """The GPUs that torch sees, and their generation; 0 if it sees none."""
        command, environ = [sys.executable, "-c", _SEEN], self._environment(os.environ)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        count, generation = map(int, done.stdout.split() if not done.returncode else (0, 0))
        return count, generation


def without(flags: Sequence[str], left_out: Mapping[str, int]) -> Iterator[str]:
    """The flags but for some. left_out: how many words each of those has."""
    words = iter(flags)
    for word in words:
        for _ in range(left_out.get(word, 0) - 1):
            next(words)
        if word not in left_out:
            yield word
