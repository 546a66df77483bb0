"""Standby prefill: when a session needs a second worker, and which one."""

from __future__ import annotations

import pytest

from scheduler.placing.standby import choose_standby, is_strained

PROMPT = 10_000


@pytest.mark.parametrize(
    ("pending_tokens", "running", "strained"),
    [
        (0, 0.74, False),
        (0, 0.75, True),
        (0, None, False),
        (PROMPT // 2, None, True),
        (PROMPT // 2 - 1, 0.1, False),
    ],
)
def test_a_worker_is_strained_by_what_runs_or_by_what_waits(
    pending_tokens: int, running: float | None, strained: bool
) -> None:
    assert is_strained(PROMPT, pending_tokens, running) is strained


def test_only_an_idle_worker_is_chosen() -> None:
    assert choose_standby(PROMPT, 7, {"other": 0}, []) is None


def test_the_idle_worker_that_holds_most_is_chosen() -> None:
    held = {"w200": 200, "w4000": 4_000}
    for idle in (["w200", "w4000"], ["w4000", "w200"]):
        assert choose_standby(PROMPT, 7, held, idle) == "w4000"


def test_no_standby_is_chosen_while_another_worker_holds_the_prompt() -> None:
    assert choose_standby(PROMPT, 7, {"idle": 0, "warm": PROMPT - 500}, ["idle"]) is None
    assert choose_standby(PROMPT, 7, {"idle": 0, "half": PROMPT // 2}, ["idle"]) == "idle"


def test_a_short_prompt_is_not_worth_it() -> None:
    assert choose_standby(1_000, 7, {"idle": 0}, ["idle"]) is None


def test_every_balancer_chooses_the_same_of_equal_workers() -> None:
    held = {f"w{n}": 0 for n in range(5)}
    assert choose_standby(PROMPT, 7, held, list(held)) == choose_standby(
        PROMPT, 7, held, list(held)[::-1]
    )
