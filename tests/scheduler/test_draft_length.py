"""How wide steps are: as wide as pays by what was measured, and by what drafts gave."""

from __future__ import annotations

import pytest

from scheduler.draft_length import LONGEST_REST, Acceptance, DraftLengths, Offer

WIDTHS = (1, 2, 4, 8, 16)


def steps(
    lengths: DraftLengths, batch: int, cost: float, chance: float, count: int, draft: int = 15
) -> list[int]:
    """Widths of steps in which each further token costs a share of a step, and each request has a
    draft of which a token is right with this chance."""
    widths = []
    for _ in range(count):
        width = 1
        if not lengths.is_resting(batch):
            width = lengths.choose(batch, [Offer(draft, chance)] * batch)
        lengths.took(batch, width, 0.01 * (1 + cost * (width - 1)))
        widths.append(width)
    return widths


def test_the_first_step_of_a_size_measures_a_single_token() -> None:
    assert steps(DraftLengths(WIDTHS), 1, 0.01, 0.9, 2)[0] == 1


def test_wider_steps_are_tried_one_by_one() -> None:
    assert steps(DraftLengths(WIDTHS), 1, 0.01, 0.95, 6) == [1, 2, 4, 8, 16, 16]


@pytest.mark.parametrize(("cost", "widest"), [(0.001, 16), (0.2, 8), (0.5, 2), (2.0, 1)])
def test_a_step_is_as_wide_as_pays(cost: float, widest: int) -> None:
    last = steps(DraftLengths(WIDTHS), 4, cost, 0.8, 40)[-1]
    assert last <= widest
    assert (last > 1) == (widest > 1)


def test_a_draft_is_verified_as_far_as_it_goes() -> None:
    assert steps(DraftLengths(WIDTHS), 1, 0.001, 0.9, 40, draft=3)[-1] == 4


def test_without_drafts_a_step_has_one_token() -> None:
    lengths = DraftLengths(WIDTHS)
    steps(lengths, 1, 0.001, 0.9, 9)
    assert lengths.choose(1, []) == 1
    assert lengths.choose(1, [Offer(0, 0.9)]) == 1


def test_one_request_of_a_batch_may_not_hold_up_the_others() -> None:
    lengths = DraftLengths(WIDTHS)
    for width in WIDTHS:
        lengths.took(16, width, 0.01 * (1 + 0.2 * (width - 1)))
    assert lengths.choose(16, [Offer(15, 0.9)]) == 1
    assert lengths.choose(16, [Offer(15, 0.9)] * 16) > 1


def test_where_drafts_do_not_pay_the_search_rests_longer_each_time() -> None:
    widths = steps(DraftLengths(WIDTHS), 16, 1.0, 0.3, 4_000)
    assert sum(width > 1 for width in widths) <= 4_000 / LONGEST_REST + 2
    lengths, searched = DraftLengths(WIDTHS), 0
    for _ in range(4_000):
        if not lengths.is_resting(16):
            searched += 1
            lengths.choose(16, [Offer(15, 0.3)] * 16)
        lengths.took(16, 1, 0.01)
        lengths.took(16, 2, 0.02)
    assert searched < 100


def test_the_rest_ends_once_drafts_pay_again() -> None:
    lengths = DraftLengths(WIDTHS)
    steps(lengths, 16, 1.0, 0.3, 2_000)
    assert 16 in steps(lengths, 16, 0.01, 0.95, 4 * LONGEST_REST)


def test_a_time_of_a_single_token_is_measured_again() -> None:
    widths = steps(DraftLengths(WIDTHS), 1, 0.01, 0.95, 2_000)
    assert 4 <= widths[10:].count(1) <= 10


def test_a_pause_of_the_process_is_no_cost_of_a_width() -> None:
    lengths = DraftLengths(WIDTHS)
    steps(lengths, 1, 0.01, 0.95, 50)
    lengths.took(1, 16, 30.0)
    assert lengths.choose(1, [Offer(15, 0.95)]) > 1


def test_what_drafts_gave_decides_what_they_are_worth() -> None:
    lengths, request = DraftLengths(WIDTHS), Acceptance()
    short, long = (lengths.offer(15, matched, Acceptance()) for matched in (1, 32))
    assert short.chance < long.chance
    for _ in range(60):
        lengths.verified(32, 10, 0, request)
    assert lengths.offer(15, 32, Acceptance()).chance < 0.3
    assert lengths.offer(15, 1, Acceptance()).chance == short.chance
    for _ in range(200):
        lengths.verified(32, 10, 10, Acceptance())
    assert lengths.offer(15, 32, Acceptance()).chance > 0.9


def test_a_request_whose_drafts_are_wrong_gets_less_than_others() -> None:
    lengths, bad = DraftLengths(WIDTHS), Acceptance()
    for _ in range(200):
        lengths.verified(8, 10, 10, Acceptance())
    for _ in range(5):
        lengths.verified(8, 10, 0, bad)
    assert lengths.offer(15, 8, bad).chance < lengths.offer(15, 8, Acceptance()).chance - 0.2


def test_an_offer_is_worth_the_tokens_before_the_first_wrong_one() -> None:
    offer = Offer(3, 0.5)
    assert [offer.expected(width) for width in (1, 2, 3, 4, 9)] == [1, 1.5, 1.75, 1.875, 1.875]
