"""People of one harness in the simulator: our router, and one that knows sessions by heart."""

from __future__ import annotations

import pytest

from bench.routing import harness_setup
from bench.sim.seeds import simulate_seeds
from bench.trace.run import moves_of


def test_a_request_moves_if_the_one_before_of_its_conversation_went_elsewhere() -> None:
    one = [(1.0, "a"), (2.0, "b"), (5.0, "a")]
    other = [(3.0, "a"), (4.0, "b"), (6.0, "c")]
    assert moves_of([one, other]) == 3
    assert moves_of([one, []]) == 0


@pytest.mark.slow
def test_a_burst_of_one_harness_does_not_queue_at_one_worker() -> None:
    setup = harness_setup("same_harness")
    found = simulate_seeds(setup.trace, setup.engine, setup.workers, range(1, 4))
    ours, sticky = found["ours_without_events"], found["sticky"]
    assert ours["ttft_p50_ms"]["median"] <= 1.05 * sticky["ttft_p50_ms"]["median"]
    assert ours["ttft_p99_ms"]["median"] <= 2 * sticky["ttft_p99_ms"]["median"]
    assert ours["moves"]["max"] < 20
    assert ours["load_max_over_mean"]["max"] < 1.2


@pytest.mark.slow
def test_eight_harnesses_stay_on_few_workers() -> None:
    setup = harness_setup("eight_harnesses")
    found = simulate_seeds(setup.trace, setup.engine, setup.workers, range(1, 4))
    ours, sticky = found["ours_without_events"], found["sticky"]
    assert ours["ttft_p95_ms"]["median"] < 0.5 * sticky["ttft_p95_ms"]["median"]
    assert ours["cached_ratio"]["min"] > sticky["cached_ratio"]["max"]
