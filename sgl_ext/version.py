"""Which sgl-ext, SGLang and commit run here, found without importing SGLang.

The build hook, `hatch_build.py`, runs this file where nothing else is installed.
"""

import json
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parent
COMMIT_FILE = "commit.txt"
"""The build hook writes it into the package of a wheel."""
_DIGITS = 12
_GIT_TIMEOUT_S = 5


class Versions(NamedTuple):
    """What is installed here. None: not installed, or not known."""

    sgl_ext: str
    commit: str | None
    sglang: str | None


@cache
def versions() -> Versions:
    """The versions, read once. It may run git, in a checkout."""
    return Versions(_installed("sgl-ext") or "unknown", _commit(), _installed("sglang"))


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a checkout, of a wheel, or of what pip installed from a repository's URL."""
    root = _PACKAGE.parent
    # Only a repository of our own: an environment can be a folder inside somebody else's.
    if (root / ".git").exists():
        return commit_of(root)
    written = _PACKAGE / COMMIT_FILE
    if written.exists():
        return written.read_text("utf-8").strip() or None
    try:
        text = metadata.distribution("sgl-ext").read_text("direct_url.json")
        return str(json.loads(text or "{}")["vcs_info"]["commit_id"])[:_DIGITS]
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return None


def commit_of(root: Path) -> str | None:
    """The commit that a checkout is at, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", f"--abbrev={_DIGITS}"]
    try:
        found = subprocess.run(
            command, cwd=root, capture_output=True, check=True, text=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
