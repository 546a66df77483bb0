"""Waiting for what happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

HANG_S = 300
"""When a wait counts as a hang: on no machine does what a test waits for take so long."""


def until(condition: Callable[[], bool], limit_s: int = HANG_S) -> None:
    """Returns once the condition holds; the limit is for a hang."""
    ends_s, pause_s = time.monotonic() + limit_s, 0.002
    while not condition():
        if time.monotonic() > ends_s:
            pytest.fail("it never came to hold")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
