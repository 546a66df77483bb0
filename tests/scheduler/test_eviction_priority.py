"""What is evicted first."""

from __future__ import annotations

import pytest

from scheduler.eviction_priority import EVICT_FIRST, EVICT_NORMALLY, eviction_priority


def test_what_a_client_may_come_back_for_is_kept() -> None:
    assert eviction_priority(is_kept=True, is_last=False, is_answer_kept=True) == (
        EVICT_NORMALLY,
        EVICT_NORMALLY,
    )


@pytest.mark.parametrize(("is_kept", "is_last"), [(False, False), (True, True)])
def test_what_nobody_asks_for_again_goes_first(is_kept: bool, is_last: bool) -> None:
    worth = eviction_priority(is_kept=is_kept, is_last=is_last, is_answer_kept=True)
    assert worth == (EVICT_FIRST, EVICT_FIRST)


def test_an_answer_that_no_prompt_will_begin_with_goes_before_its_prompt() -> None:
    worth = eviction_priority(is_kept=True, is_last=False, is_answer_kept=False)
    assert worth.answer < worth.prompt == EVICT_NORMALLY
