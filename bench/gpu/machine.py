"""Where the engines of a report run, and with which model and settings.

On a GPU the model has the shape of an 8B model, or a smaller one where two such engines do not fit
into the free memory. The engine draws its weights, so that nothing large is on disk. A machine
without a GPU runs the same steps with the tiny model on the CPU platform.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_ext_cpu.model import SHAPES, Shape
from sgl_ext_cpu.node import FORKING, ROOT

from sgl_ext.node.hardware import Hardware, find_hardware
from sgl_ext.node.start.room import free_gpu_memory
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.sources import launch_settings

_GIB = 1 << 30
_BLACKWELL = 10  # the major number of its compute capability
_GPU_MODELS = ("8b-config", "2b-config", "small-config")
_POOL_TOKENS = 163_840
# The largest KV cache of a bench (bench/fanout), and what an engine needs beside it and weights.
_LARGEST_POOL_TOKENS, _BESIDE_BYTES, _ENGINES = 196_608, 6 * _GIB, 2
_ENGINE = """\
[launch]
instances = 1
{platform}
[engine]
load-format = "dummy"
reasoning-parser = "qwen3"
tool-call-parser = "qwen25"
max-total-tokens = {pool}
max-running-requests = 32
"""
# Captures of CUDA graphs that take most of a start.
_FEW_GRAPHS = """\
cuda-graph-backend-prefill = "disabled"
cuda-graph-max-bs-decode = 16
"""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Machine:
    """The device, the size of the model, and the variables of every step.

    gpu: its id; None: the CPU platform. variable: the one that names GPUs. deterministic: the
        attention backend for deterministic kernels.
    """

    gpu: str | None
    model: str = "tiny"
    variable: str = "CUDA_VISIBLE_DEVICES"
    deterministic: str = "fa3"

    @property
    def bench_size(self) -> str:
        """The flag for the size of each bench."""
        return "--smallest" if self.gpu is None else "--brief"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of each step: no downloads, this checkout's helpers, and one device."""
        paths = (str(ROOT / "launch/cpu"), os.environ.get("PYTHONPATH"))
        found = {**_OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.gpu is None:
            return found | FORKING
        return found | {
            self.variable: self.gpu,
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "sgl_ext_cpu.models",
        }

    def write_configs(self, folder: Path) -> tuple[Path, Path]:
        """Writes settings of engines, and returns the files: with SGLang's own CUDA graphs, and
        with few of them, so that many engines start in ten minutes."""
        own, few = folder / "engines.toml", folder / "engines-with-few-graphs.toml"
        platform = 'platform = "cpu"\n' if self.gpu is None else ""
        text = _ENGINE.format(platform=platform, pool=_POOL_TOKENS)
        own.write_text(text)
        few.write_text(text + (_FEW_GRAPHS if self.gpu is not None else ""))
        return own, few


def find_machine(find: Callable[[LaunchSettings], Hardware] = find_hardware) -> Machine:
    """The GPU to use, with no model yet; the CPU where there is no sign of a GPU.

    Raises SettingsError for GPUs that cannot be used.
    """
    try:
        hardware = find(launch_settings(["--model-path", "any"]))
    except SettingsError:
        if shutil.which("nvidia-smi") is None and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            return Machine(None)
        raise
    if hardware.platform is not None:
        return Machine(None)
    return Machine(freest(hardware.gpus), variable=hardware.variable)


def freest(gpus: Sequence[str]) -> str:
    """The GPU with the most free memory; the first one if that is unknown."""
    free = free_gpu_memory()
    return max(gpus, key=lambda gpu: free.get(gpu, 0))


def needed_bytes(shape: Shape) -> int:
    """The GPU memory that the benches take with a model of this shape."""
    pool = _LARGEST_POOL_TOKENS * shape.token_bytes
    return _ENGINES * (shape.weight_bytes + pool + _BESIDE_BYTES)


def with_model(machine: Machine, torch_facts: Mapping[str, Any]) -> Machine:
    """The machine, with the largest model that fits. torch_facts: of the environment step.

    Raises LookupError if torch cannot use the GPU, or if it has too little free memory.
    """
    gpu = machine.gpu
    if gpu is None:
        return machine
    if not torch_facts.get("multiplies"):
        why = torch_facts.get("error") or (
            f"torch is built for CUDA {torch_facts['cuda_version']}"
            if "cuda_version" in torch_facts
            else "the environment is not known"
        )
        raise LookupError(f"torch cannot use GPU {gpu}: {why}")
    free = int(torch_facts["free_bytes"])
    # Of the deterministic ones, on Blackwell only this one works with a radix cache.
    backend = "triton" if torch_facts["capability"][0] >= _BLACKWELL else "fa3"
    for name in _GPU_MODELS:
        if needed_bytes(SHAPES[name]) <= free:
            return replace(machine, model=name, deterministic=backend)
    least = needed_bytes(SHAPES[_GPU_MODELS[-1]])
    raise LookupError(
        f"GPU {gpu} has {free / _GIB:.1f} GiB free, and the smallest model needs "
        f"{least / _GIB:.1f} GiB: end what else uses it, or set CUDA_VISIBLE_DEVICES"
    )
