"""What a report was measured on: the machine, the versions, and the code."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from sgl_ext_cpu.node import ROOT

from sgl_ext.version import versions

_PACKAGES = ("sglang", "torch", "transformers", "aiohttp", "uvloop")
_CODE = ("bench", "launch", "radix", "scheduler", "sgl_ext", "pyproject.toml")
# How tables are made is no part of what was measured.
_DRAWING = "bench/report/"


def machine() -> dict[str, Any]:
    """What decides how fast this machine is."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def packages() -> dict[str, str]:
    """Versions of what serves."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout, with a mark if files differ from it."""
    return versions().commit or "unknown"


def code(root: Path = ROOT) -> str:
    """A hash of all code that takes part in a measurement."""
    digest = hashlib.sha256()
    for name in _CODE:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            place = file.relative_to(root).as_posix()
            is_code = file.suffix in (".py", ".toml", ".jinja", ".txt")
            if is_code and file.is_file() and not place.startswith(_DRAWING):
                digest.update(place.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
