"""What loads and passes took, as a scheduler sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.load_cost import ENOUGH, PRIOR
from sgl_ext.engine.tiers.host_tier import Loads


class Event:
    """A device's event; events of the CPU have no clock."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def load(tokens: int, took_ms: float | None = None) -> Any:
    times = Event(5.0), Event(5.0 + (took_ms or 0.0))
    return SimpleNamespace(
        num_tokens=tokens,
        timing_enabled=took_ms is not None,
        start_event=times[0],
        finish_event=times[1],
    )


def compute(loads: Loads, *, loaded: int = 0, took_us: int = 100_000) -> None:
    """Each pass over 1,000 tokens takes 100 ms, or what is given."""
    for n in range(1, ENOUGH + 1):
        scheduler: Any = SimpleNamespace(
            total_prefill_uncached_tokens=1000 * n, total_prefill_busy_us=took_us * n
        )
        batch: Any = SimpleNamespace(reqs=[SimpleNamespace(host_loaded_length=loaded)])
        loads.computed(scheduler, batch)
        loads.computed(scheduler, batch)  # a batch that only decodes


def test_a_device_that_has_a_clock_is_believed() -> None:
    loads = Loads()
    compute(loads)
    for _ in range(ENOUGH):
        loads.started(9.0)
    loads.finished([load(1000, took_ms=20.0)] * ENOUGH)
    assert loads.cost.share == pytest.approx(0.2)


def test_without_such_a_clock_the_copy_has_taken_what_its_call_took() -> None:
    loads = Loads()
    compute(loads)
    for took_s in (0.01, 0.05, 0.05):
        loads.started(took_s)
    loads.finished([load(1000)])
    assert loads.cost.share == PRIOR
    loads.finished([load(1000), load(1000)])
    assert loads.cost.share == pytest.approx(0.5)


def test_a_pass_that_waited_for_a_load_says_nothing_of_computing() -> None:
    loads = Loads()
    compute(loads, loaded=500, took_us=900_000)
    loads.finished([load(1000, took_ms=20.0)] * ENOUGH)
    assert loads.cost.share == PRIOR
