"""Clients at the versions of versions.toml, each in a folder of its own, once a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.node import ROOT

_CACHE = ROOT / ".models" / "clients"
_INSTALL_TIMEOUT_S = 300.0
_OFFLINE = re.compile(
    r"npm error code (EAI_AGAIN|ECONNREFUSED|ECONNRESET|EHOSTUNREACH|ENETUNREACH|ENOTFOUND"
    r"|ERR_SOCKET_TIMEOUT|ETIMEDOUT)\b|(Failed to fetch|client error \(Connect\)|dns error)"
)
CLIENTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("versions.toml").read_text())
RAISED = CLIENTS.pop("raised")


def version(client: str) -> str:
    """The version of the client's first package."""
    (packages,) = CLIENTS[client].values()
    return str(next(iter(packages.values())))


def installed(client: str) -> Path:
    """The folder with the client's commands: npm's `node_modules/.bin`, or a venv's `bin`.

    Skips the test if the client is not installed and its registry is out of reach.
    """
    ((registry, packages),) = CLIENTS[client].items()
    name = client.lower().replace(" ", "-")
    folder = _CACHE / f"{name}-{'-'.join(packages.values())}"
    commands = folder / ("node_modules/.bin" if registry == "npm" else "bin")
    if folder.exists():
        return commands
    _CACHE.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=_CACHE))
    try:
        (_from_npm if registry == "npm" else _from_pypi)(draft, packages)
        draft.chmod(0o755)
        try:
            os.rename(draft, folder)
        except OSError:
            # Another run was first.
            assert folder.exists()
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return commands


def _from_npm(folder: Path, packages: dict[str, str]) -> None:
    flags = ["--no-save", "--no-audit", "--no-fund", "--fetch-retries=1"]
    wanted = [f"{package}@{number}" for package, number in packages.items()]
    _run([_found("npm"), "install", *flags, f"--prefix={folder}", *wanted])


def _from_pypi(folder: Path, packages: dict[str, str]) -> None:
    uv = _found("uv")
    _run([uv, "venv", "--quiet", "--clear", "--relocatable", "--python", sys.executable, folder])
    wanted = [f"{package}=={number}" for package, number in packages.items()]
    _run([uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *wanted])


def _found(command: str) -> str:
    """A command of this environment, or of PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if found := shutil.which(command, path=path):
        return found
    pytest.skip(f"{command} is not on PATH, and the client is not installed")


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_INSTALL_TIMEOUT_S,
        check=False,
    )
    if offline := _OFFLINE.search(done.stderr):
        pytest.skip(f"a registry is out of reach: {offline[0]}")
    assert done.returncode == 0, done.stderr
