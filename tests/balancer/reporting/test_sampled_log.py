"""Lines about requests: a few for each cause, and the number of the rest."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sgl_ext.balancer.reporting.request_log import LINES_PER_CAUSE, SampledLog


def _causes(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Any]]:
    found = [(vars(r)["cause"], vars(r).get("left_out")) for r in caplog.records]
    caplog.clear()
    return found


def test_of_each_cause_a_few_lines_are_logged_and_the_rest_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampled = SampledLog()
    for number in range(10):
        sampled.add(logging.WARNING, "request rejected", "the queue is full", request=str(number))
    sampled.add(logging.WARNING, "request rejected", "no engine")
    assert _causes(caplog) == [("the queue is full", None)] * LINES_PER_CAUSE + [
        ("no engine", None)
    ]
    sampled.sweep()
    assert _causes(caplog) == [("the queue is full", 10 - LINES_PER_CAUSE)]
    sampled.sweep()
    sampled.add(logging.WARNING, "request rejected", "the queue is full")
    assert _causes(caplog) == [("the queue is full", None)]


def test_causes_without_end_are_counted_as_one(caplog: pytest.LogCaptureFixture) -> None:
    sampled = SampledLog()
    for number in range(1000):
        sampled.add(logging.WARNING, "attempt failed", str(number))
    assert len(_causes(caplog)) == 100 + LINES_PER_CAUSE
    sampled.sweep()
    assert _causes(caplog) == [("other causes", 900 - LINES_PER_CAUSE)]
