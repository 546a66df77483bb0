"""Eviction priorities of prompts and outputs."""

from __future__ import annotations

import pytest

from scheduler.eviction_priority import EVICT_FIRST, EVICT_NORMALLY, eviction_priority


def test_a_reusable_prompt_is_evicted_normally() -> None:
    assert eviction_priority(is_kept=True, is_last=False, is_answer_kept=True) == (
        EVICT_NORMALLY,
        EVICT_NORMALLY,
    )


@pytest.mark.parametrize(("is_kept", "is_last"), [(False, False), (True, True)])
def test_a_prompt_that_will_not_be_read_again_is_evicted_first(
    is_kept: bool, is_last: bool
) -> None:
    worth = eviction_priority(is_kept=is_kept, is_last=is_last, is_answer_kept=True)
    assert worth == (EVICT_FIRST, EVICT_FIRST)


def test_an_output_that_no_prompt_will_contain_is_evicted_before_its_prompt() -> None:
    worth = eviction_priority(is_kept=True, is_last=False, is_answer_kept=False)
    assert worth.answer < worth.prompt == EVICT_NORMALLY
