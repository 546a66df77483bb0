"""What all benches share: how they end, and how they report the spread of their rounds."""

from __future__ import annotations

import pytest

from bench.lib.script import NOT_VALID, precondition, require, run
from bench.lib.spread import ratio_spread, spread


def ended(capsys: pytest.CaptureFixture[str], *, invalid: bool) -> tuple[object, str, str]:
    """The status, stdout and stderr of a bench whose check does not hold."""

    def measure() -> dict[str, object]:
        check = precondition if invalid else require
        check(False, "a flood is larger than the cache", tokens=7)
        return {}

    with pytest.raises(SystemExit) as raised:
        run("name", measure)
    return raised.value.code, *capsys.readouterr()


def test_a_broken_invariant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    named = "bench.name: broken invariant: a flood is larger than the cache (tokens=7)"
    assert ended(capsys, invalid=False) == (named, "", "")


def test_a_precondition_that_did_not_hold_has_a_status_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = "bench.name: not valid: a flood is larger than the cache (tokens=7)\n"
    assert ended(capsys, invalid=True) == (NOT_VALID, "", named)


def test_a_spread_has_the_median_and_the_extremes_of_all_rounds() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": 3}


@pytest.mark.parametrize(
    ("ones", "crosses"), [((3.0, 4.0), False), ((1.0, 4.0), True), ((1.0, 1.5), False)]
)
def test_a_ratio_whose_rounds_lie_on_both_sides_of_1_is_marked(
    ones: tuple[float, ...], crosses: bool
) -> None:
    assert ratio_spread(ones, (2.0, 2.0))["crosses_1"] is crosses


def test_pairs_of_a_ratio_are_of_the_same_round() -> None:
    found = ratio_spread((10.0, 1.0, 20.0), (5.0, 1.0, 5.0))
    assert (found["median"], found["min"], found["max"]) == (2.0, 1.0, 4.0)
