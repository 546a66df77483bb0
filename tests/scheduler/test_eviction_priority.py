"""What is evicted first."""

from __future__ import annotations

import pytest

from scheduler.eviction_priority import WORTH_KEEPING, WORTHLESS, worth_of


def test_what_a_client_may_come_back_for_is_kept() -> None:
    assert worth_of(is_kept=True, is_last=False, is_answer_kept=True) == (
        WORTH_KEEPING,
        WORTH_KEEPING,
    )


@pytest.mark.parametrize(("is_kept", "is_last"), [(False, False), (True, True)])
def test_what_nobody_asks_for_again_goes_first(is_kept: bool, is_last: bool) -> None:
    worth = worth_of(is_kept=is_kept, is_last=is_last, is_answer_kept=True)
    assert worth == (WORTHLESS, WORTHLESS)


def test_an_answer_that_no_prompt_will_begin_with_goes_before_its_prompt() -> None:
    worth = worth_of(is_kept=True, is_last=False, is_answer_kept=False)
    assert worth.answer < worth.prompt == WORTH_KEEPING
