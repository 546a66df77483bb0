"""Receipts: a small file from each process of an engine that its hooks are in place."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import orjson

_VARIABLE = "SGL_EXT_RECEIPTS"


def open_folder() -> None:
    """Makes a fresh folder for this engine, known to its children through the environment."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="sgl-ext-receipts-")


def folder() -> Path:
    """This engine's own folder; nobody else on the machine can read it, or guess its name."""
    return Path(os.environ[_VARIABLE])


def leave(role: str, symbols: Sequence[str]) -> None:
    """Records that this process has applied and verified `symbols`."""
    path = folder() / f"{role}-{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(orjson.dumps({"role": role, "symbols": list(symbols)}))
    partial.rename(path)


def count() -> Counter[str]:
    """How many processes of each role have left a receipt."""
    return Counter(path.name.rsplit("-", 1)[0] for path in folder().glob("*.json"))
