"""Other projects' programs, each installed from PyPI into an environment of its own.

They live under `.models/peers/`, and are installed once a checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_ext_cpu.node import ROOT

_CACHE = ROOT / ".models" / "peers"


def install_package(name: str, version: str, *beside: str) -> Path:
    """The Python of an environment of its own that holds a package, made once a checkout.

    `beside` are requirements that are installed with it.
    Raises RuntimeError with the installer's output if that fails.
    """
    folder = _CACHE / f"{name}-{version}"
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    _CACHE.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)])
    run([str(python), "-m", "pip", "install", "--quiet", f"{name}=={version}", *beside])
    (folder / "installed").touch()
    return python


def run(command: Sequence[str]) -> str:
    """What a command prints. Raises RuntimeError with all of it if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
