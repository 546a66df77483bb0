"""The balancer understands no message otherwise than h11 does."""

from __future__ import annotations

import logging

import pytest

from tests.fuzz.http import run

CASES = 100_000
_ALWAYS = 5_000


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The log of every answer that is not well-formed would take most of the time."""
    caplog.set_level(logging.CRITICAL, "sgl_ext")


def test_what_the_balancer_accepts_h11_understands_alike() -> None:
    counts = run(0, _ALWAYS)
    assert counts["requests accepted"] > _ALWAYS / 3
    assert counts["answers passed on"] > _ALWAYS / 5


@pytest.mark.long
@pytest.mark.slow
def test_many_more_are_understood_alike() -> None:
    run(_ALWAYS, CASES - _ALWAYS)
