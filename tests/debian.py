"""What tests need of Debian's packages. Where CI is set, they install it themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

_LIMIT_S = 240
INSTALL = "apt-get install --yes --no-install-recommends "
"""How the reason of a skip ends, before the names of packages."""


def require_promtool() -> None:
    """Skips the test without Prometheus's tool, which reads pages and rules as Prometheus does."""
    require_debian(lambda: shutil.which("promtool") is not None, "prometheus")


def require_debian(is_there: Callable[[], bool], *packages: str) -> None:
    """Skips the test unless `is_there`, if need be after the packages were installed."""
    if is_there():
        return
    install = f"{INSTALL}{' '.join(packages)}"
    if "CI" in os.environ and os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            # Another process of the tests may be installing.
            command = f"apt-get update && {install} -o DPkg::Lock::Timeout={_LIMIT_S}"
            subprocess.run(command, shell=True, capture_output=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{packages[0]} could not be installed within {_LIMIT_S} s")
    if not is_there():
        pytest.skip(f"not installed: {install}")
