"""Startup acknowledgements: each process of an engine writes a file once its hooks are verified."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

_VARIABLE = "SGL_EXT_ENGINE_FOLDER"


def open_folder() -> None:
    """Makes a new folder for this engine. Its child processes find it by the environment."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="sgl-ext-engine-")


def folder() -> Path:
    """The engine's folder. Other users of the machine cannot read it, and its name is secret."""
    return Path(os.environ[_VARIABLE])


def acknowledge(role: str) -> None:
    """Records that this process has verified its hooks."""
    (folder() / f"{role}-{os.getpid()}.ack").touch()


def count() -> Counter[str]:
    """How many processes of each role have acknowledged."""
    return Counter(path.name.rsplit("-", 1)[0] for path in folder().glob("*.ack"))
