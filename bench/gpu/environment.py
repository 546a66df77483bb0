"""What is this machine? Prints its GPUs, driver, compilers and the versions of what serves.

Nothing here fails because something is missing: that is what is to be seen. A part that takes too
long is left out, and named.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sgl_ext.version import versions

_PACKAGES = (
    *("sgl-ext", "sglang", "torch", "triton", "transformers", "flashinfer-python"),
    *("flashinfer-cubin", "flashinfer-jit-cache", "sglang-kernel", "sgl-kernel", "flash-attn-4"),
    *("xgrammar", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "apache-tvm-ffi"),
)
_TOOLS = ("nvcc", "gcc", "g++", "ninja")
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
    *("SGLANG_PLATFORM", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "HF_HUB_OFFLINE"),
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
)
_QUERY = (
    *("index", "uuid", "name", "driver_version", "compute_cap", "mig.mode.current"),
    *("memory.total", "memory.used", "utilization.gpu", "power.limit", "clocks.max.sm"),
)
_NVIDIA_SMI_S = 20.0
_TORCH_S = 100.0
_TORCH = """
import json, torch
found = {"cuda_version": torch.version.cuda, "is_cuda_available": torch.cuda.is_available()}
if found["is_cuda_available"]:
    free, total = torch.cuda.mem_get_info()
    found |= {
        "device": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "free_bytes": free,
        "total_bytes": total,
        "architectures": torch.cuda.get_arch_list(),
    }
    one = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    found["multiplies"] = float((one @ one)[0, 0]) == 256.0
print(json.dumps(found))
"""


def environment() -> dict[str, Any]:
    """All of it."""
    return {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "shared_memory_gib": _size_gib(Path("/dev/shm")),
        "commit": versions().commit,
        "packages": {name: _version(name) for name in _PACKAGES if _version(name)},
        "tools": {name: shutil.which(name) for name in _TOOLS},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "gpus": gpus(),
        "others_on_gpus": _smi("--query-compute-apps=gpu_uuid,used_memory"),
        "torch": torch_facts(),
    }


def gpus() -> list[dict[str, str]] | str:
    """What nvidia-smi says of each GPU, or why it says nothing."""
    found = _smi(f"--query-gpu={','.join(_QUERY)}")
    if isinstance(found, str):
        return found
    return [dict(zip(_QUERY, line, strict=False)) for line in found]


def torch_facts() -> dict[str, Any]:
    """What torch sees of the GPU, after a first product on it. `error` says what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {_TORCH_S:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _smi(query: str) -> list[list[str]] | str:
    """The rows of a query to nvidia-smi, or why there are none."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S)
    except FileNotFoundError:
        return "there is no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    if done.returncode:
        return f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[-300:]}"
    lines = done.stdout.splitlines()
    return [[word.strip() for word in line.split(",")] for line in lines if line.strip()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _size_gib(folder: Path) -> float | None:
    return round(shutil.disk_usage(folder).total / 2**30, 1) if folder.exists() else None


if __name__ == "__main__":
    print(json.dumps({"step": "environment", **environment()}))
