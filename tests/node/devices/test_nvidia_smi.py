"""What is made of nvidia-smi, played by small programs, and of torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_ext.node.devices.nvidia_smi import Listed, list_devices
from sgl_ext.node.devices.torch_probe import ask_torch

MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0a)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1a)
  MIG 3g.20gb     Device  0: (UUID: MIG-b1)
  MIG 4g.20gb     Device  1: (UUID: MIG-b2)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-2a)
  MIG 7g.40gb     Device  0: (UUID: MIG-c1)
GPU 3: NVIDIA A100-SXM4-40GB (UUID: GPU-3a)
"""
PROGRAMS = {
    "two": "echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'",
    "mig": f"cat <<'END'\n{MIG}END",
    "none": "echo No devices found.",
    "failing": "echo 'NVIDIA-SMI has failed: no communication with the driver.'; exit 9",
    "slow": "exec sleep 60",
}


def listed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Listed:
    if name in PROGRAMS:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{PROGRAMS[name]}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return list_devices(0.1 if name == "slow" else 30)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("two", Listed(("0", "1"))),
        ("mig", Listed(("0", "MIG-b1", "MIG-b2", "MIG-c1", "3"))),
        ("none", Listed()),
        ("absent", Listed(problem="nvidia-smi is not installed")),
        ("slow", Listed(problem="nvidia-smi -L gave no answer in 0.1 s")),
        (
            "failing",
            Listed(
                problem="nvidia-smi -L ended with status 9: "
                "NVIDIA-SMI has failed: no communication with the driver."
            ),
        ),
    ],
)
def test_what_it_lists(
    name: str, wanted: Listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listed(name, tmp_path, monkeypatch) == wanted


@pytest.mark.long
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    seen = ask_torch({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (seen.count, seen.problem) == (0, "")
    assert seen.version
    assert "no GPU" in seen.build or "CUDA" in seen.build


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')")
    seen = ask_torch({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert seen.problem == "torch cannot be imported: ImportError: libcudart.so.13: not found"
    assert "within 0.001 s" in ask_torch(os.environ, 0.001).problem
