"""Waiting for what happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


def until(condition: Callable[[], bool], limit_s: int = 300) -> None:
    """Returns once the condition holds; the limit is for a hang."""
    for _ in range(20 * limit_s):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never came to hold")
