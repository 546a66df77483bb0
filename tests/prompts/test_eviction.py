"""An eviction is what the engine lost, and nothing that another cause explains."""

from __future__ import annotations

import pytest

from sgl_ext.prompts.prompt import Left, evicted_tokens, left_by
from sgl_ext.reading.segments import Chain

LEFT = left_by("e", Chain((1, 2, 3), (8_000, 30_000, 40_000)), 10_000)


def test_a_turn_leaves_its_prompt() -> None:
    assert Left("e", 10_000, 7_500) == LEFT
    assert left_by("e", Chain((1,), (400,)), 100) == Left("e", 100, 0)
    assert left_by("e", Chain((1,), (400,)), None) is None
    assert left_by("e", Chain(), 100) is None


@pytest.mark.parametrize(
    ("held", "cached", "tokens"),
    [
        (0, 0, 10_000),  # flushed
        (0, 400, 9_600),  # another session has its beginning there
        (2_000, 2_048, 7_952),  # the end was evicted
        (10_000, 9_990, 0),  # a normal turn
        (7_500, 9_990, 0),  # the engine reports the last segment late
        (7_500, 7_400, 0),
        (9_900, 300, 0),  # the template renders history anew: it is held, and not asked for
        (0, 9_990, 0),  # read from the host's cache, or not yet reported
        (None, 0, 0),  # the earlier engine's cache is unknown
        (0, None, 0),  # the engine counts nothing
    ],
)
def test_the_engine_and_the_index_must_agree(
    held: int | None, cached: int | None, tokens: int
) -> None:
    assert evicted_tokens(LEFT, held, cached) == tokens


def test_nothing_is_evicted_of_what_nobody_left() -> None:
    assert evicted_tokens(None, 0, 0) == 0
    assert evicted_tokens(Left("e", 100, 0), 0, 0) == 0, "less than pages and a template explain"
