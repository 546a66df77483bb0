"""Pins: leases on prefixes that are renewed as they are read, within a budget."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix.pins import BUDGET, EMPTY, LESS_VALUABLE, OWNER_SHARE, Grant, Pin, Pins

TTL_S = 300.0

Tokens = tuple[int, ...]
Prefix = tuple[Hashable, Tokens]
runs = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


def key(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def prompt(name: int, tokens: int) -> bytes:
    """A prompt of `tokens` tokens that prompts of other names do not contain."""
    return key(range(name * 100_000, name * 100_000 + tokens))


def grant(pins: Pins, name: int, tokens: int, now: float, **options: Any) -> Grant:
    found = pins.grant("", prompt(name, tokens), options.pop("ttl_s", TTL_S), now, **options)
    pins.check()
    return found


def pin(pins: Pins, name: int, tokens: int, now: float, **options: Any) -> Pin:
    found = grant(pins, name, tokens, now, **options).pin
    assert found is not None
    return found


def assert_nothing_left(pins: Pins) -> None:
    pins.check()
    assert len(pins) == pins.tokens == 0
    tree = pins._tree
    assert not any((pins._pins, pins._order))
    assert not any((tree._roots, tree._nodes, tree._charges))


def test_a_pin_that_is_never_read_lasts_for_its_ttl() -> None:
    pins = Pins(budget_tokens=100)
    made = pin(pins, 1, 10, now=0)
    assert pins.expire(299.9) == []
    assert pins.tokens == 10
    assert pins.expire(300) == [made]
    assert_nothing_left(pins)


def test_a_hit_renews_every_pin_whose_prefix_the_request_read_whole() -> None:
    pins = Pins(budget_tokens=100)
    short, middle, long = (pin(pins, 1, tokens, now=0) for tokens in (10, 20, 30))
    other = pin(pins, 2, 10, now=0)
    assert pins.hit("", prompt(1, 50), now=200, tokens=25) == [short, middle]
    assert [p.hits for p in (short, middle, long, other)] == [1, 1, 0, 0]
    assert [p.used_s for p in (short, middle, long, other)] == [200, 200, 0, 0]
    pins.check()
    assert pins.expire(300) == [long, other]
    assert pins.tokens == 20
    assert pins.expire(500) == [short, middle]
    assert_nothing_left(pins)


def test_a_prompt_shorter_than_a_pin_does_not_read_it() -> None:
    pins = Pins(budget_tokens=100)
    pin(pins, 1, 20, now=0)
    assert pins.hit("", prompt(1, 19), now=1, tokens=19) == []
    assert pins.hit("lora", prompt(1, 20), now=1, tokens=20) == []


def test_pins_expire_in_the_order_of_their_deadlines() -> None:
    pins = Pins(budget_tokens=100)
    slow, quick, quicker = (
        pin(pins, n, 5, now=0, ttl_s=ttl_s) for n, ttl_s in enumerate((9, 7, 5))
    )
    assert pins.expire(10) == [quicker, quick, slow]


def test_leases_that_end_together_end_in_parts() -> None:
    pins = Pins(budget_tokens=100)
    slow, quick, quicker = (
        pin(pins, n, 5, now=0, ttl_s=ttl_s) for n, ttl_s in enumerate((9, 7, 5))
    )
    assert pins.expire(10, most=2) == [quicker, quick]
    pins.check()
    assert pins.expire(10, most=2) == [slow], "the rest is not forgotten"
    assert_nothing_left(pins)


def test_a_renewal_after_an_expiry_check_counts_in_the_next() -> None:
    """The soonest deadline is remembered: it must not be remembered for too long."""
    pins = Pins(budget_tokens=100)
    made = pin(pins, 1, 10, now=0)
    pins.hit("", prompt(1, 10), now=299, tokens=10)
    assert pins.expire(300) == []
    short = pin(pins, 2, 10, now=301, ttl_s=1)
    assert pins.expire(302) == [short]
    assert pins.expire(599) == [made]


def test_a_second_request_for_a_pin_renews_it_and_is_no_hit() -> None:
    pins = Pins(budget_tokens=100)
    first = pin(pins, 1, 10, now=0, ttl_s=100, priority=2, label="first")
    again = grant(pins, 1, 10, now=50, ttl_s=200, owner="ann", session="s", priority=1)
    assert again == (first, False, [], "")
    assert (first.ttl_s, first.deadline_s, first.used_s, first.hits) == (200, 250, 50, 0)
    assert (first.priority, first.label) == (2, "first")
    assert (first.owner, first.session) == ("ann", "s")
    assert pins.of_session("s") == [first]
    # Neither a shorter lease nor another owner takes anything away.
    grant(pins, 1, 10, now=60, ttl_s=10, owner="ben", session="t", priority=5)
    assert (first.ttl_s, first.deadline_s, first.priority) == (200, 260, 5)
    assert (first.owner, first.session) == ("ann", "s")
    assert pins.of_session("t") == []
    assert len(pins) == 1


def test_a_renewal_copies_nothing_of_a_long_prompt() -> None:
    """A turn of a million tokens renews several pins, each eight bytes a token."""

    class Prompt(bytes):
        copied = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            Prompt.copied += len(found) if isinstance(found, bytes) else 1
            return found

    whole, pins = Prompt(prompt(1, 1000)), Pins(budget_tokens=2000)
    for tokens in (400, 900):
        assert pins.grant("", whole, TTL_S, 0, tokens=tokens).is_new
    Prompt.copied = 0
    for tokens in (400, 900):
        known = pins.pinned("", whole, tokens)
        again = pins.grant("", whole, TTL_S, 1, tokens=tokens)
        assert (again.pin, again.is_new) == (known, False)
        assert known is not None
        assert known.tokens == tokens
    assert len(pins.hit("", whole, 1, 1000)) == 2
    assert Prompt.copied <= 100
    assert pins.pinned("", whole, 500) is None


def test_what_pins_share_is_counted_once() -> None:
    pins = Pins(budget_tokens=30)
    pin(pins, 1, 20, now=0)
    pin(pins, 1, 30, now=0)
    assert (len(pins), pins.tokens) == (2, 30)
    # Nothing is shared between spaces.
    found = pins.grant("lora", prompt(1, 10), TTL_S, 0)
    assert [p.tokens for p in found.released] == [30]
    assert pins.tokens == 30


def test_the_same_prefix_has_another_hash_in_another_space() -> None:
    pins = Pins(budget_tokens=100)
    one = pins.grant(("m", None), prompt(1, 10), TTL_S, 0).pin
    two = pins.grant(("m", "lora"), prompt(1, 10), TTL_S, 0).pin
    assert one is not None
    assert two is not None
    assert one.prefix != two.prefix
    assert len(one.prefix) == 32
    assert pins.pinned(("m", "lora"), prompt(1, 10)) is two
    assert pins.pinned(("m", "lora"), prompt(1, 9)) is None
    assert pins.pinned(("m", "lora"), prompt(1, 11)) is None
    again = Pins(budget_tokens=10).grant(("m", None), prompt(1, 10), TTL_S, 7).pin
    assert again is not None
    assert again.prefix == one.prefix, "a name is the same wherever it is made"


def test_a_fresh_pin_displaces_one_that_was_never_read() -> None:
    pins = Pins(budget_tokens=30)
    read = pin(pins, 1, 10, now=0)
    unread = pin(pins, 2, 10, now=1)
    later = pin(pins, 3, 10, now=2)
    pins.hit("", prompt(1, 10), now=3, tokens=10)
    assert pins.in_order() == [unread, later, read]
    assert grant(pins, 4, 10, now=4).released == [unread]
    assert grant(pins, 5, 10, now=4).released == [later]


def test_a_pin_in_use_is_not_displaced_while_its_reads_justify_it() -> None:
    pins = Pins(budget_tokens=10)
    used = pin(pins, 1, 10, now=0)
    pins.hit("", prompt(1, 10), now=10, tokens=10)
    assert grant(pins, 2, 10, now=24) == (None, False, [], LESS_VALUABLE)
    assert list(pins) == [used]
    # One read vouches for half of a tenth of the lease, from that read on.
    assert grant(pins, 2, 10, now=26).released == [used]


def test_a_pin_that_was_read_more_often_is_valuable_for_longer() -> None:
    pins = Pins(budget_tokens=20)
    once, often = pin(pins, 1, 10, now=0), pin(pins, 2, 10, now=0)
    for _ in range(9):
        pins.hit("", prompt(2, 10), now=10, tokens=10)
    pins.hit("", prompt(1, 10), now=11, tokens=10)
    assert pins.in_order() == [once, often]
    assert often.valuable_until_s == pytest.approx(37)


def test_a_higher_priority_displaces_a_lower_one_regardless() -> None:
    pins = Pins(budget_tokens=10)
    low = pin(pins, 1, 10, now=0)
    pins.hit("", prompt(1, 10), now=1, tokens=10)
    high = grant(pins, 2, 10, now=2, priority=1)
    assert high.released == [low]
    assert grant(pins, 1, 10, now=1000).reason == LESS_VALUABLE
    assert list(pins) == [high.pin]


def test_a_prefix_longer_than_the_budget_releases_nothing() -> None:
    pins = Pins(budget_tokens=10, owner_share=0.5)
    pin(pins, 1, 5, now=0)
    assert grant(pins, 2, 11, now=1) == (None, False, [], BUDGET)
    assert grant(pins, 2, 6, now=1) == (None, False, [], OWNER_SHARE)
    assert grant(pins, 2, 0, now=1) == (None, False, [], EMPTY)
    assert len(pins) == 1
    assert grant(Pins(budget_tokens=0), 1, 1, now=0).reason == BUDGET


def test_if_there_is_no_room_nothing_is_released() -> None:
    pins = Pins(budget_tokens=30)
    pin(pins, 1, 10, now=0)
    pin(pins, 2, 20, now=0, priority=1)
    assert grant(pins, 3, 11, now=1) == (None, False, [], LESS_VALUABLE)
    assert (len(pins), pins.tokens) == (2, 30)


def test_a_longer_prefix_keeps_the_pins_on_its_path() -> None:
    pins = Pins(budget_tokens=30)
    short = pin(pins, 1, 10, now=0)
    other = pin(pins, 2, 10, now=1)
    long = grant(pins, 1, 25, now=2)
    assert long.released == [other]
    assert list(pins) == [short, long.pin]


def test_a_fork_keeps_what_it_shares_with_the_pin_it_displaces() -> None:
    pins = Pins(budget_tokens=10)
    old = pins.grant("", key([1] * 8 + [2] * 2), TTL_S, 0).pin
    new = pins.grant("", key([1] * 8 + [3] * 2), TTL_S, 0)
    pins.check()
    assert new.released == [old]
    assert pins.tokens == 10


def test_a_pin_is_not_released_for_tokens_that_another_needs() -> None:
    pins = Pins(budget_tokens=30)
    short = pin(pins, 1, 10, now=0)
    long = pin(pins, 1, 20, now=0, priority=1)
    other = pin(pins, 2, 10, now=1)
    assert pins.in_order() == [short, other, long]
    assert grant(pins, 3, 10, now=2).released == [other]


def test_a_pin_that_need_not_go_stays() -> None:
    pins = Pins(budget_tokens=40)
    small, big = pin(pins, 1, 10, now=0), pin(pins, 2, 30, now=1)
    assert grant(pins, 3, 30, now=2).released == [big]
    assert pins.in_order()[0] is small


def test_of_two_pins_the_more_valuable_stays() -> None:
    pins = Pins(budget_tokens=40)
    first, second, third = (pin(pins, n, tokens, now=n) for n, tokens in enumerate((10, 10, 20)))
    assert grant(pins, 4, 30, now=4).released == [first, third]
    assert pins.in_order()[0] is second


def test_nested_pins_go_together_if_that_makes_room() -> None:
    pins = Pins(budget_tokens=20)
    short, long = pin(pins, 1, 10, now=0), pin(pins, 1, 20, now=1)
    assert grant(pins, 2, 15, now=2).released == [short, long]
    assert pins.tokens == 15


def test_beyond_its_share_an_owner_displaces_only_its_own() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5)
    others = pin(pins, 1, 10, now=0, owner="ben")
    own = pin(pins, 2, 20, now=1, owner="ann")
    assert grant(pins, 3, 10, now=2, owner="ann").released == [own]
    assert pins.in_order()[0] is others
    assert (pins.tokens_of("ann"), pins.tokens_of("ben"), pins.tokens) == (10, 10, 20)
    for _ in range(2):
        pins.hit("", prompt(3, 10), now=3, tokens=10)
    assert grant(pins, 4, 15, now=4, owner="ann") == (None, False, [], OWNER_SHARE)
    assert len(pins) == 2


def test_an_owner_can_have_a_share_of_its_own() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5, owner_shares={"ann": 0.25, "ben": 0.0})
    assert grant(pins, 1, 11, now=0, owner="ann").reason == OWNER_SHARE
    first = pin(pins, 2, 10, now=0, owner="ann")
    assert grant(pins, 3, 10, now=1, owner="ann").released == [first]
    assert grant(pins, 4, 1, now=1, owner="ben").reason == OWNER_SHARE
    pin(pins, 5, 20, now=1, owner="cat")
    pins.check()


def test_an_owner_does_not_displace_others_for_tokens_it_is_charged_for() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5)
    begun = pin(pins, 1, 10, now=0, owner="ann")
    pin(pins, 1, 20, now=0, owner="ben")
    pins.release(begun)
    assert pins.tokens_of("ann") == 10
    assert grant(pins, 2, 11, now=1, owner="ann") == (None, False, [], OWNER_SHARE)
    assert grant(pins, 2, 10, now=1, owner="ann").released == []


def test_if_share_and_budget_are_full_the_owners_pins_go_first() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5)
    asked = [("ben", 8), ("ann", 5), ("ben", 9), ("ann", 10), ("cat", 8)]
    made = [pin(pins, n, tokens, now=n, owner=owner) for n, (owner, tokens) in enumerate(asked)]
    assert pins.tokens == 40
    assert grant(pins, 9, 10, now=9, owner="ann").released == [made[0], made[1]]


def test_an_own_pin_stays_if_another_released_for_the_budget_frees_its_share() -> None:
    pins = Pins(budget_tokens=22, owner_share=0.5)
    small = pins.grant("", key([0, 0]), TTL_S, 0).pin
    large = pin(pins, 1, 4, now=0)
    pin(pins, 2, 5, now=0, owner="ben")
    pin(pins, 3, 7, now=0, owner="ann")
    # Releasing the small pin would be enough for the share, but not for the budget.
    assert pins.grant("", key([0, 1, 0, 0, 0, 0, 0]), TTL_S, 0).released == [large]
    assert small in pins


def test_priority_does_not_cross_owners_inside_their_shares() -> None:
    """4,096 pins of one token, 4% of the budget, displaced all that another tenant had."""
    pins = Pins(budget_tokens=100_000, owner_share=0.25)
    kept = [pin(pins, n, 1_000, now=0, owner="ben") for n in range(20)]
    for n in range(4096):
        pins.grant("", prompt(100 + n, 1), TTL_S, 1, owner="ann", priority=100)
    pins.check()
    assert set(kept) <= set(pins)
    assert sum(each.owner == "ann" for each in pins) == 1024, "its share of the number"


def test_one_long_pin_does_not_displace_another_owner_s_by_default() -> None:
    pins = Pins(budget_tokens=100)
    kept = [pin(pins, n, 10, now=0, owner="ben") for n in range(5)]
    assert grant(pins, 9, 100, now=1, owner="ann", priority=100).reason == LESS_VALUABLE
    assert grant(pins, 9, 51, now=1, owner="ann", priority=100).reason == LESS_VALUABLE
    assert grant(pins, 9, 50, now=1, owner="ann", priority=100).released == []
    assert set(kept) < set(pins)


def test_an_owner_gets_its_part_back_from_one_that_used_what_it_left() -> None:
    pins = Pins(budget_tokens=100, limit_pins=10)
    theirs = [pin(pins, n, 10, now=n, owner="ann", priority=100) for n in range(10)]
    for n in range(5):
        assert grant(pins, 20 + n, 10, now=20, owner="ben").released == [theirs[n]]
    # Now each has its half, and what is more valuable stays within an owner.
    assert grant(pins, 30, 10, now=30, owner="ben").released[0].owner == "ben"
    assert grant(pins, 31, 10, now=40, owner="ann").reason == LESS_VALUABLE


def test_under_pressure_the_owner_with_most_gives_way_first() -> None:
    pins = Pins(budget_tokens=100)
    large = [pin(pins, n, 20, now=n, owner="ann", priority=100) for n in range(3)]
    small = [pin(pins, 10 + n, 10, now=9 + n, owner="ben") for n in range(2)]
    assert pins.in_turns() == [large[0], large[1], large[2], small[0], small[1]]
    alone = Pins(budget_tokens=100)
    for n in range(5):
        pin(alone, n, 10, now=0, priority=-n)
    assert alone.in_turns() == alone.in_order()


asks = st.tuples(st.sampled_from(["ann", "cat"]), runs, st.integers(0, 9), st.integers(0, 5))


@given(
    mine=st.lists(runs, min_size=1, max_size=3, unique=True),
    theirs=st.lists(asks, max_size=60),
    share=st.sampled_from([0.25, 0.5, 1.0]),
    pages=st.booleans(),
)
def test_whatever_others_pin_an_owner_within_its_part_keeps_its_pins(
    mine: list[Tokens], theirs: list[tuple[str, Tokens, int, int]], share: float, pages: bool
) -> None:
    """A third of 60 tokens, or its share, and as much of the number of pins."""
    pins = Pins(budget_tokens=60, owner_share=share, limit_pins=12 if pages else 4096)
    for tokens in mine:
        pins.grant("ben", key(tokens), TTL_S, 0, owner="ben")
    kept = set(pins)
    assume(pins.tokens_of("ben") <= (15 if share == 0.25 else 20))
    for owner, tokens, priority, times in theirs:
        for n in range(times + 1):
            prefix = key((*tokens, 7, n))
            pins.grant(owner, prefix, TTL_S, 1, owner=owner, priority=priority)
            pins.hit(owner, prefix, 1, len(prefix))
    pins.check()
    assert kept <= set(pins)


def test_requests_without_an_owner_count_as_one_owner() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5)
    first = pin(pins, 1, 20, now=0)
    assert grant(pins, 2, 20, now=1).released == [first]


def test_an_owner_is_charged_only_for_tokens_that_it_pins_first() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5)
    pin(pins, 1, 15, now=0, owner="ann")
    pin(pins, 1, 20, now=0, owner="ben")
    assert (pins.tokens_of("ann"), pins.tokens_of("ben")) == (15, 5)
    assert grant(pins, 2, 15, now=1, owner="ben").released == []


def test_a_prefix_longer_than_a_share_is_rejected_even_if_others_are_charged() -> None:
    pins = Pins(budget_tokens=40, owner_share=0.5)
    pin(pins, 1, 15, now=0, owner="ann")
    assert grant(pins, 1, 21, now=0, owner="ben") == (None, False, [], OWNER_SHARE)


def test_two_thousand_prefixes_stay_within_the_limit_and_leave_nothing() -> None:
    pins = Pins(budget_tokens=1_000_000, limit_pins=512)
    for n in range(2_000):
        found = pins.grant("", key([n % 7, n]), TTL_S, n / 100, session=f"s{n}", owner=f"o{n % 3}")
        assert found.pin is not None
        assert [gone.id for gone in found.released] == ([n - 511] if n >= 512 else [])
    pins.check()
    assert (len(pins), pins.tokens) == (512, 512 + 7)
    assert len(pins.expire(1000)) == 512
    assert_nothing_left(pins)


def test_at_the_limit_the_least_valuable_pin_is_rejected() -> None:
    pins = Pins(budget_tokens=100, limit_pins=1)
    kept = pin(pins, 1, 10, now=0, priority=1)
    assert grant(pins, 2, 10, now=1) == (None, False, [], LESS_VALUABLE)
    assert list(pins) == [kept]
    assert grant(pins, 1, 10, now=2).pin is kept, "a pin that exists can be renewed"


def test_at_the_limit_a_longer_prefix_keeps_the_pins_on_its_path() -> None:
    pins = Pins(budget_tokens=100, limit_pins=2)
    pin(pins, 1, 10, now=0)
    other = pin(pins, 2, 10, now=1)
    assert grant(pins, 1, 20, now=2).released == [other]
    assert grant(pins, 1, 30, now=3).reason == LESS_VALUABLE


def test_a_smaller_budget_releases_the_least_valuable_of_those_who_have_most() -> None:
    pins = Pins(budget_tokens=100)
    first, second = (pin(pins, name, 30, now=0, owner="a") for name in (1, 2))
    other = pin(pins, 3, 30, now=0, owner="b")
    pins.hit("", prompt(1, 30), 1, 30)
    assert pins.change_limits(70, 1.0, {}) == [second]
    assert set(pins) == {first, other}
    assert pins.change_limits(100, 1.0, {}) == []
    assert pins.change_limits(0, 1.0, {}) == [other, first]


def test_a_smaller_share_releases_only_the_owners_pins() -> None:
    pins = Pins(budget_tokens=100)
    old = pin(pins, 1, 30, now=0, owner="a")
    new = pin(pins, 2, 30, now=1, owner="a")
    other = pin(pins, 3, 30, now=0, owner="b")
    assert pins.change_limits(100, 1.0, {"a": 0.4}) == [old]
    assert set(pins) == {new, other}


def test_a_pin_stays_if_its_release_would_free_nothing() -> None:
    pins = Pins(budget_tokens=100)
    short = pin(pins, 1, 30, now=0)
    long = pin(pins, 1, 40, now=1)
    other = pin(pins, 2, 40, now=2)
    assert pins.change_limits(80, 1.0, {}) == []
    assert pins.change_limits(75, 1.0, {}) == [long]
    assert set(pins) == {short, other}


def test_a_clock_that_jumps_back_takes_no_time_from_a_lease() -> None:
    pins = Pins(budget_tokens=100)
    first = pin(pins, 1, 10, now=1000)
    pins.hit("", prompt(1, 10), now=500, tokens=10)
    assert (first.used_s, first.deadline_s) == (1000, 1300)
    second = pin(pins, 2, 10, now=500)
    assert (second.granted_s, second.deadline_s) == (1000, 1300)
    assert pins.expire(1300) == [first, second]


def test_a_released_prefix_can_be_pinned_again() -> None:
    pins = Pins(budget_tokens=100)
    first = pin(pins, 1, 10, now=0, session="s")
    assert pins.prefixes_of("", prompt(1, 11)) == [first]
    assert pins.prefixes_of("", prompt(1, 11), 9) == []
    assert pins.prefixes_of("lora", prompt(1, 11)) == []
    assert pins.release(first)
    assert not pins.release(first)
    assert pins.prefixes_of("", prompt(1, 11)) == []
    assert_nothing_left(pins)
    second = pin(pins, 1, 10, now=1)
    assert second.id > first.id
    assert not pins.release(first), "the same prefix, but not the same pin"
    assert list(pins) == [second]


def test_a_session_has_the_pins_that_it_requested_first() -> None:
    pins = Pins(budget_tokens=100)
    one, two = (pin(pins, n, 10, now=0, session="s") for n in (1, 2))
    pin(pins, 3, 10, now=0)
    assert pins.of_session("s") == [one, two]
    assert pins.of_session("") == pins.of_session("t") == []
    pins.release(one)
    assert pins.of_session("s") == [two]


def test_clear_removes_all_pins() -> None:
    pins = Pins(budget_tokens=100)
    made = [pin(pins, n, 10, now=0, session="s") for n in (2, 1)]
    assert pins.clear() == made
    assert_nothing_left(pins)
    assert pins.expire(1e9) == []
    pin(pins, 1, 10, now=1e9)


SPACES = ("", "lora")
OWNERS = ("", "ann", "ben")
spaces = st.sampled_from(SPACES)


def prefixes(at: Prefix) -> list[Prefix]:
    return [(at[0], at[1][:end]) for end in range(1, len(at[1]) + 1)]


class Machine(RuleBasedStateMachine):
    """The pins of one engine, and beside them every prefix that any pin needs."""

    @initialize(
        budget=st.integers(0, 24), share=st.sampled_from([0.3, 0.5, 1.0]), limit=st.integers(1, 9)
    )
    def begin(self, budget: int, share: float, limit: int) -> None:
        self.budget, self.share, self.limit = budget, int(budget * share), limit
        self.most = max(int(limit * share), 1)
        self.options: dict[str, Any] = {
            "budget_tokens": budget,
            "owner_share": share,
            "limit_pins": limit,
        }
        self.pins = Pins(**self.options)
        self.other_rank = Pins(**self.options)
        self.at: dict[Pin, Prefix] = {}
        self.charged: dict[Prefix, str] = {}
        self.now = 0.0

    def union(self, pins: set[Pin]) -> set[Prefix]:
        return {prefix for pin in pins for prefix in prefixes(self.at[pin])}

    def forget(self, pins: list[Pin]) -> None:
        for gone in pins:
            del self.at[gone]
        needed = self.union(set(self.at))
        self.charged = {p: owner for p, owner in self.charged.items() if p in needed}

    def charge_of(self, owner: str, among: set[Prefix], charged: dict[Prefix, str]) -> int:
        return sum(charged[prefix] == owner for prefix in among)

    @rule(seconds=st.integers(-5, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(
        space=spaces,
        tokens=runs,
        ttl_s=st.integers(1, 30),
        owner=st.sampled_from(OWNERS),
        session=st.sampled_from(["", "s", "t"]),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def grant(
        self, space: str, tokens: Tokens, ttl_s: int, owner: str, session: str, priority: int
    ) -> None:
        order = self.pins.in_order()
        before = {pin: repr(pin) for pin in order}
        asked = (space, key(tokens), float(ttl_s), self.now)
        named: dict[str, Any] = {"owner": owner, "session": session, "priority": priority}
        found = self.pins.grant(*asked, **named)
        assert repr(self.other_rank.grant(*asked, **named)) == repr(found)
        at = (space, tokens)
        if at in self.at.values():
            assert found.pin is not None
            assert self.at[found.pin] == at
            assert found == (found.pin, False, [], "")
            return
        now = self.pins._now_s
        on_path = {pin for pin in order if self.at[pin] in prefixes(at)}
        below = {pin for pin in order if (pin.priority, pin.valuable_until_s) <= (priority, now)}
        charged = dict.fromkeys(prefixes(at), owner) | self.charged
        count = Counter([owner, *(pin.owner for pin in order)])
        part = min(self.share, self.budget // len(count))
        part_pins = min(self.most, self.limit // len(count))

        def held(gone: set[Pin]) -> set[Prefix]:
            """What would be pinned with the new one and without those."""
            return self.union(set(order) - gone) | set(prefixes(at))

        def is_within_part(of: str, gone: set[Pin]) -> bool:
            pins = count[of] - sum(pin.owner == of for pin in gone)
            return self.charge_of(of, held(gone), charged) <= part and pins <= part_pins

        own = {pin for pin in below - on_path if pin.owner == owner}
        beyond = {each for each in count if not is_within_part(each, set())} - {owner}
        # Pins of others hold tokens, too, that the owner is charged for.
        theirs = {pin for pin in below - on_path if pin.owner in beyond}
        reclaims = is_within_part(owner, own | theirs)
        may_go = [
            pin
            for pin in order
            if pin in own
            or (pin.owner in beyond and pin not in on_path and (pin in below or reclaims))
        ]

        if found.pin is None:
            assert found == Grant(None, False, [], found.reason)
            assert {pin: repr(pin) for pin in self.pins.in_order()} == before
            over_share = self.charge_of(owner, held(own), charged) > self.share
            over_share |= count[owner] - len(own) > self.most
            if found.reason == BUDGET:
                assert len(tokens) > self.budget
            elif found.reason == OWNER_SHARE:
                assert len(tokens) > self.share or over_share
            else:
                assert found.reason == LESS_VALUABLE
                # Of others' pins, those beyond their part may go: how many depends on the order.
                gone = own if beyond else set(may_go)
                full = len(order) - len(gone) >= self.limit
                assert len(held(gone)) > self.budget or full
            return
        released = set(found.released)
        assert found.is_new
        assert released <= set(may_go)
        assert found.released == [pin for pin in may_go if pin in released]

        def fits(gone: set[Pin]) -> bool:
            union = held(gone)
            return (
                len(union) <= self.budget
                and self.charge_of(owner, union, charged) <= self.share
                and len(order) - len(gone) < self.limit
                and count[owner] - sum(pin.owner == owner for pin in gone) <= self.most
            )

        assert fits(released)
        for kept in released:
            assert not fits(released - {kept}), "more than had to be"
        if self.share == self.budget and released and len(count) == 1:
            passed = set(may_go[: may_go.index(found.released[-1])])
            last = {found.released[-1]}
            assert not fits(passed), "the first ones would have done"
            assert fits(passed | last)
        self.at[found.pin] = at
        self.charged = charged
        self.forget(found.released)

    @rule(space=spaces, tokens=runs, read=st.integers(0, 8))
    def hit(self, space: str, tokens: Tokens, read: int) -> None:
        expected = {
            pin: (pin.hits + 1, pin.deadline_s, pin.ttl_s)
            for pin, at in self.at.items()
            if at in prefixes((space, tokens[:read]))
        }
        found = self.pins.hit(space, key(tokens), self.now, read)
        self.other_rank.hit(space, key(tokens), self.now, read)
        now = self.pins._now_s
        assert set(found) == set(expected)
        assert [pin.tokens for pin in found] == sorted(pin.tokens for pin in found)
        for pin, (hits, deadline_s, ttl_s) in expected.items():
            assert (pin.hits, pin.used_s) == (hits, now)
            assert pin.deadline_s == max(deadline_s, now + ttl_s)

    @rule()
    def expire(self) -> None:
        gone = self.pins.expire(self.now)
        assert repr(self.other_rank.expire(self.now)) == repr(gone)
        assert set(gone) == {pin for pin in self.at if pin.deadline_s <= self.pins._now_s}
        assert all(a.deadline_s <= b.deadline_s for a, b in itertools.pairwise(gone))
        self.forget(gone)

    @rule(budget=st.integers(0, 24), share=st.sampled_from([0.1, 0.3, 0.5, 1.0]))
    def change_limits(self, budget: int, share: float) -> None:
        order = self.pins.in_order()
        self.budget, self.share = budget, int(budget * share)
        self.most = max(int(self.limit * share), 1)
        gone = self.pins.change_limits(budget, share, {})
        assert repr(self.other_rank.change_limits(budget, share, {})) == repr(gone)
        assert gone == [pin for pin in order if pin in gone]
        left = set(order) - set(gone)

        def fits(pins: set[Pin]) -> bool:
            union, count = self.union(pins), Counter(pin.owner for pin in pins)
            charges = (self.charge_of(owner, union, self.charged) for owner in OWNERS)
            is_within = all(n <= self.most for n in count.values())
            return len(union) <= budget and max(charges) <= self.share and is_within

        for kept in gone:
            assert not fits(left | {kept}), "more than had to be"
        self.forget(gone)

    @precondition(lambda self: self.at)
    @rule(choice=st.integers(0, 8))
    def release(self, choice: int) -> None:
        gone = list(self.at)[choice % len(self.at)]
        (twin,) = (pin for pin in self.other_rank if pin.prefix == gone.prefix)
        assert self.pins.release(gone)
        assert self.other_rank.release(twin)
        self.forget([gone])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pins"):
            return
        self.pins.check()
        assert set(self.pins) == set(self.at)
        assert self.charged.keys() == self.union(set(self.at))
        assert self.pins.tokens == len(self.charged) <= self.budget
        for owner in OWNERS:
            charge = self.charge_of(owner, set(self.charged), self.charged)
            assert self.pins.tokens_of(owner) == charge <= self.share
            assert sum(pin.owner == owner for pin in self.at) <= self.most
        assert len(self.pins) <= self.limit
        for pin, (space, tokens) in self.at.items():
            assert self.pins.pinned(space, key(tokens)) is pin
            assert pin in self.pins.prefixes_of(space, key((*tokens, 1)))
        order = self.pins.in_order()
        places = [(pin.priority, pin.valuable_until_s, pin.id) for pin in order]
        assert places == sorted(places)
        assert repr(order) == repr(self.other_rank.in_order()), "ranks differ"
        assert repr(self.pins.in_turns()) == repr(self.other_rank.in_turns()), "ranks differ"
        assert set(self.pins.in_turns()) == set(order)

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.pins.expire(1e9)
            assert_nothing_left(self.pins)


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


@given(st.lists(st.tuples(spaces, runs), min_size=1, max_size=20))
def test_releasing_in_any_order_leaves_what_the_rest_needs(asked: list[Prefix]) -> None:
    pins = Pins(budget_tokens=1000)
    for space, tokens in asked:
        pins.grant(space, key(tokens), TTL_S, 0, session="s")
    at = dict(zip(pins, dict.fromkeys(asked), strict=True))
    for gone in sorted(pins, key=lambda pin: pin.prefix):
        assert pins.release(gone)
        del at[gone]
        pins.check()
        assert pins.tokens == len({p for left in at.values() for p in prefixes(left)})
    assert_nothing_left(pins)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_prefixes_that_diverge_within_a_page_do_not_share_it(page: int) -> None:
    pins = Pins(budget_tokens=100, page=page)
    for end in (1, 2):
        assert pins.grant("", key([0] * 22 + [end] * 26), TTL_S, 0).pin is not None
        pins.check()
    assert pins.tokens == 96 - 22 // page * page
    assert [p.tokens for p in pins.hit("", key([0] * 22 + [2] * 50), 1, tokens=60)] == [48]
    pins.expire(1000)
    assert_nothing_left(pins)
