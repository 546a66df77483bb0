"""Standby prefill: when a session needs a second worker, and which one."""

from __future__ import annotations

import pytest

from scheduler.standby import WorkerLoad, choose_standby, is_strained

PROMPT = 10_000


def standing(
    name: str = "home",
    held: int = PROMPT,
    pending: int = 0,
    running: float | None = 0.1,
    *,
    is_idle: bool = False,
) -> WorkerLoad:
    return WorkerLoad(name, held, pending, running, is_idle)


BUSY = standing(running=1.0)


def spare(home: WorkerLoad, *others: WorkerLoad) -> str | None:
    return choose_standby(PROMPT, 7, others) if is_strained(PROMPT, home) else None


@pytest.mark.parametrize(
    ("home", "strained"),
    [
        (standing(running=0.74), False),
        (standing(running=0.75), True),
        (standing(running=None), False),
        (standing(running=None, pending=PROMPT // 2), True),
        (standing(pending=PROMPT // 2 - 1), False),
    ],
)
def test_a_worker_is_strained_by_what_runs_or_by_what_waits(
    home: WorkerLoad, strained: bool
) -> None:
    assert is_strained(PROMPT, home) is strained
    assert (spare(home, standing("other", held=0, is_idle=True)) == "other") is strained


def test_only_an_idle_worker_is_chosen() -> None:
    assert spare(BUSY, standing("other", held=0)) is None


def test_the_idle_worker_that_holds_most_is_chosen() -> None:
    least, most = (standing(f"w{held}", held, is_idle=True) for held in (200, 4_000))
    assert spare(BUSY, least, most) == spare(BUSY, most, least) == "w4000"


def test_no_standby_is_chosen_while_another_worker_holds_the_prompt() -> None:
    idle = standing("idle", held=0, is_idle=True)
    assert spare(BUSY, idle, standing("warm", held=PROMPT - 500)) is None
    assert spare(BUSY, idle, standing("half", held=PROMPT // 2)) == "idle"


def test_a_short_prompt_is_not_worth_it() -> None:
    idle = standing("idle", held=0, is_idle=True)
    assert choose_standby(1_000, 7, [idle]) is None


def test_every_balancer_chooses_the_same_of_equal_workers() -> None:
    names = [f"w{n}" for n in range(5)]
    workers = [standing(name, 0, is_idle=True) for name in names]
    assert spare(BUSY, *workers) == spare(BUSY, *reversed(workers))
