"""Waiting for what happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

HANG_S = 300
"""When a wait counts as a hang: on no machine does what a test waits for take so long."""


def until(condition: Callable[[], bool], limit_s: int = HANG_S) -> None:
    """Returns once the condition holds; the limit is for a hang."""
    for _ in range(20 * limit_s):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never came to hold")
