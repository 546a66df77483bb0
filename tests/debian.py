"""What tests need of Debian's packages. Where CI is set, they install it themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

_LIMIT_S = 240


def require_debian(is_there: Callable[[], bool], *packages: str) -> None:
    """Skips the test unless `is_there`, if need be after the packages were installed."""
    if is_there():
        return
    install = f"apt-get install --yes --no-install-recommends {' '.join(packages)}"
    if "CI" in os.environ and os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            command = f"apt-get update && {install}"
            subprocess.run(command, shell=True, capture_output=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{packages[0]} could not be installed within {_LIMIT_S} s")
    if not is_there():
        pytest.skip(f"not installed: {install}")
