"""What `nvidia-smi -L` lists: GPUs, or the MIG slices that they are divided into."""

import re
import shutil
import subprocess
from typing import NamedTuple

LIMIT_S = 30.0
"""A driver without its persistence daemon takes many seconds for its first answer."""

_GPU = re.compile(r"GPU (\d+):")
_SLICE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


class Listed(NamedTuple):
    """The devices that CUDA_VISIBLE_DEVICES can name.

    ids: indices of GPUs, and UUIDs of MIG slices in place of a GPU that is divided.
    problem: why nvidia-smi did not answer; "" if it did.
    """

    ids: tuple[str, ...] = ()
    problem: str = ""


def list_devices(limit_s: float = LIMIT_S) -> Listed:
    """The node's devices as nvidia-smi lists them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Listed(problem="nvidia-smi is not installed")
    try:
        answer = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=limit_s, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Listed(problem=f"nvidia-smi -L gave no answer in {limit_s:g} s")
    except OSError as error:
        return Listed(problem=f"nvidia-smi cannot be run: {error.strerror}")
    if answer.returncode:
        said = " ".join((answer.stderr + answer.stdout).split())[:300]
        return Listed(problem=f"nvidia-smi -L ended with status {answer.returncode}: {said}")
    return Listed(parsed_devices(answer.stdout))


def parsed_devices(text: str) -> tuple[str, ...]:
    """The devices in the output of `nvidia-smi -L`."""
    ids: list[str] = []
    for line in text.splitlines():
        if found := _GPU.match(line):
            whole = found[1]
            ids.append(whole)
        elif (found := _SLICE.match(line)) and ids:
            if ids[-1] == whole:
                ids.pop()
            ids.append(found[1])
    return tuple(ids)
