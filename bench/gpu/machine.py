"""Where the engines of a report run, and with which model and settings.

On a GPU the engines of the group `wide` have the shape of an 8B model, or of a smaller one where
all groups together do not fit into the free memory; the narrow engines have the next smaller one.
The engine draws its weights, so that nothing large is on disk. A machine without a GPU runs the
same steps with the tiny model on the CPU platform.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_ext_cpu.model import SHAPES
from sgl_ext_cpu.node import FORKING, ROOT

from bench.gpu.groups import GROUPS, Group, Setting
from sgl_ext.node.checks import free_gpu_memory
from sgl_ext.node.hardware import Hardware, find_hardware
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.sources import launch_settings

_GIB = 1 << 30
_BLACKWELL = 10  # the major number of its compute capability
_GPU_MODELS = (
    ("8b-config", "2b-config"),
    ("2b-config", "small-config"),
    ("small-config", "small-config"),
)
"""Of the large and of the other engines, the largest first."""
_JUDGE = "small-config"
_BESIDE_BYTES = 4 * _GIB
"""What an engine needs beside weights and KV cache."""
_SMALLEST_POOL_TOKENS = 8_192
_HEAD = """\
[launch]
instances = 1
{platform}
[engine]
"""
_ENGINE = {"load-format": "dummy", "reasoning-parser": "qwen3", "tool-call-parser": "qwen25"}
# Captures of CUDA graphs take most of a start, and all engines share a GPU.
_ON_GPU: Mapping[str, Setting] = {
    "cuda-graph-backend-prefill": "disabled",
    "mem-fraction-static": 0.97,
}
_ONLY_GPU = ("cuda-graph-backend-decode", "enable-deterministic-inference")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Machine:
    """The device, the sizes of the models, and the variables of every step.

    gpu: its id; None: the CPU platform. model: of the large engines. narrow_model: of the others.
    variable: the one that names GPUs. deterministic: the attention backend for deterministic
    kernels.
    """

    gpu: str | None
    model: str = "tiny"
    narrow_model: str = "tiny"
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

    def model_of(self, group: Group) -> str:
        """The size of the local model of a group's engines."""
        if group.is_large or self.gpu is None:
            return self.model
        return _JUDGE if group.is_judge else self.narrow_model

    def config(self, group: Group, more: Mapping[str, str] | None = None) -> str:
        """The settings file of a group's engines. more: further settings of SGLang."""
        pool = group.pool_tokens
        if self.gpu is None and not group.is_large:
            pool = min(pool, _SMALLEST_POOL_TOKENS)
        settings: dict[str, Setting] = {
            **_ENGINE,
            "max-total-tokens": pool,
            "max-running-requests": group.slots,
            "chunked-prefill-size": group.chunk_tokens,
        }
        given = dict(group.settings)
        if self.gpu is not None:
            settings |= {**_ON_GPU, "cuda-graph-max-bs-decode": group.slots}
            if group.is_judge:
                settings["attention-backend"] = self.deterministic
        else:
            given = {name: value for name, value in given.items() if name not in _ONLY_GPU}
        settings |= given
        settings |= more or {}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        platform = 'platform = "cpu"\n' if self.gpu is None else ""
        return _HEAD.format(platform=platform) + "\n".join(lines) + "\n"


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


def needed_bytes(model: str, narrow_model: str) -> int:
    """The GPU memory that all groups take together, with models of these sizes."""
    sizes = Machine("0", model, narrow_model)
    return sum(
        len(group.arms)
        * (shape.weight_bytes + group.pool_tokens * shape.token_bytes + _BESIDE_BYTES)
        for group in GROUPS.values()
        for shape in (SHAPES[sizes.model_of(group)],)
    )


def with_model(machine: Machine, torch_facts: Mapping[str, Any], named: str = "") -> Machine:
    """The machine, with the largest models that fit, or with the large one of this name.
    torch_facts: of the environment step.

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
    models = [pair for pair in _GPU_MODELS if named in ("", pair[0])]
    for model, narrow_model in models:
        if needed_bytes(model, narrow_model) <= free:
            return replace(machine, model=model, narrow_model=narrow_model, deterministic=backend)
    least = needed_bytes(*models[-1])
    raise LookupError(
        f"GPU {gpu} has {free / _GIB:.1f} GiB free, and engines of {models[-1][0]} need "
        f"{least / _GIB:.1f} GiB: end what else uses it, or set CUDA_VISIBLE_DEVICES"
    )
