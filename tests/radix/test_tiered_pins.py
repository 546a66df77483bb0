"""Pins on two tiers: each has its limits, and a pin is on one of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix.pins import BUDGET, LESS_VALUABLE, OWNER_SHARE, Pin
from radix.residency import Tier
from radix.tiered_pins import Moves, TieredPins

TTL_S = 300.0
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def key(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def prompt(name: int, tokens: int) -> bytes:
    return key(range(name * 100_000, name * 100_000 + tokens))


def pin(pins: TieredPins, name: int, tokens: int, now: float = 0, **options: Any) -> Pin:
    granted, _ = pins.grant(DEVICE, "", prompt(name, tokens), TTL_S, now, **options)
    pins.check()
    assert granted.pin is not None
    return granted.pin


def moves(spilled: list[Pin] | None = None, ended: list[Pin] | None = None, *why: str) -> Moves:
    return Moves(spilled or [], ended or [], list(why))


def test_a_displaced_pin_moves_to_the_host_with_all_that_it_is() -> None:
    pins = TieredPins(budget_tokens=10, host_budget_tokens=10)
    old = pin(pins, 1, 10, session="s", owner="ann", priority=0, label="l")
    pins.hit("", prompt(1, 10), 1, 10)
    before = repr(old)
    new, moved = pins.grant(DEVICE, "", prompt(2, 10), TTL_S, 1000)
    assert moved == moves([old])
    assert repr(old) == before
    assert [pins.tier_of(each) for each in (old, new.pin)] == [HOST, DEVICE]
    assert pins.pinned("", prompt(1, 10), 10) is old
    assert pins.of_session("s") == [old]
    assert (pins.device.tokens, pins.host.tokens, pins.host.tokens_of("ann")) == (10, 10, 10)


def test_without_a_host_a_displaced_pin_ends() -> None:
    pins = TieredPins(budget_tokens=10)
    old = pin(pins, 1, 10)
    _, moved = pins.grant(DEVICE, "", prompt(2, 10), TTL_S, 1)
    assert moved == moves([], [old], BUDGET)
    assert old not in [*pins]


def test_a_working_set_of_four_times_the_device_budget_stays_pinned() -> None:
    pins = TieredPins(budget_tokens=100, host_budget_tokens=400)
    for name in range(40):
        pin(pins, name, 10, now=name)
    for turn in range(40, 200):
        name = turn % 40
        (read,) = pins.hit("", prompt(name, 12), turn, 10)
        if pins.tier_of(read) is HOST:
            moved = pins.load(read)
            assert moved is None or not moved.ended
        pins.check()
    assert len(pins) == 40


def test_the_host_ends_its_least_valuable_pins_for_those_that_spill() -> None:
    pins = TieredPins(budget_tokens=20, host_budget_tokens=20)
    first, second, third, fourth = (pin(pins, name, 10, now=name) for name in range(4))
    assert [*pins.host] == [first, second]
    fifth, moved = pins.grant(DEVICE, "", prompt(5, 10), TTL_S, 5)
    assert moved == moves([third], [first])
    assert {*pins} == {second, third, fourth, fifth.pin}


def test_of_pins_that_spill_together_the_most_valuable_find_room_first() -> None:
    pins = TieredPins(budget_tokens=30, host_budget_tokens=10)
    low, middle, high = (pin(pins, name, 10, now=name) for name in range(3))
    assert pins.spill([low, middle, high]) == moves([high], [low, middle], *[LESS_VALUABLE] * 2)
    assert (pins.device.tokens, pins.host.tokens) == (0, 10)


def test_a_pin_that_the_device_refuses_can_be_granted_on_the_host() -> None:
    pins = TieredPins(budget_tokens=10, host_budget_tokens=40)
    long, _ = pins.grant(DEVICE, "", prompt(1, 30), TTL_S, 0)
    assert long.reason == BUDGET
    long, moved = pins.grant(HOST, "", prompt(1, 30), TTL_S, 0)
    assert long.pin is not None
    assert (moved, pins.tier_of(long.pin)) == (moves(), HOST)
    again, _ = pins.grant(DEVICE, "", prompt(1, 30), TTL_S, 5)
    assert again == (long.pin, False, [], ""), "it is renewed where it is"
    assert long.pin.used_s == 5
    assert pins.load(long.pin) is None
    assert pins.tier_of(long.pin) is HOST
    pins.check()


def test_a_load_displaces_on_the_device_and_frees_the_host_for_what_it_displaces() -> None:
    pins = TieredPins(budget_tokens=10, host_budget_tokens=10)
    first, second = pin(pins, 1, 10, now=1), pin(pins, 2, 10, now=2)
    pins.hit("", prompt(1, 10), 3, 10)
    assert pins.load(first) == moves([second])
    assert [pins.tier_of(each) for each in (first, second)] == [DEVICE, HOST]
    pins.check()


def test_shares_hold_on_both_tiers() -> None:
    pins = TieredPins(budget_tokens=20, host_budget_tokens=20, owner_share=0.5)
    first = pin(pins, 1, 10, now=1, owner="ann")
    second = pin(pins, 2, 10, now=2, owner="ann")
    assert [pins.tier_of(each) for each in (first, second)] == [HOST, DEVICE]
    _, moved = pins.grant(DEVICE, "", prompt(3, 10), TTL_S, 3, owner="ann")
    assert moved == moves([second], [first])
    assert pins.grant(HOST, "", prompt(4, 11), TTL_S, 4, owner="ann")[0].reason == OWNER_SHARE
    others = pin(pins, 5, 10, now=5, owner="ben")
    assert pins.tier_of(others) is DEVICE


def test_smaller_limits_spill_from_the_device_and_end_on_the_host() -> None:
    pins = TieredPins(budget_tokens=20, host_budget_tokens=20)
    spilled, low, high = (pin(pins, name, 10, now=name) for name in range(3))
    assert pins.change_limits(10, 10, 1.0, {}) == moves([low], [spilled])
    assert pins.change_limits(0, 0, 1.0, {}) == moves([], [low, high], BUDGET)
    assert len(pins) == 0
    pins.check()


def test_leases_end_and_reads_count_on_both_tiers() -> None:
    pins = TieredPins(budget_tokens=20, host_budget_tokens=20)
    short, long = pin(pins, 1, 10), pin(pins, 1, 20)
    pins.spill([long])
    assert pins.prefixes_of("", prompt(1, 30)) == [short, long]
    assert pins.hit("", prompt(1, 30), 10, 20) == [short, long]
    assert pins.expire(310, most=1) == [short]
    assert pins.expire(310, most=9) == [long]
    on_host = pin(pins, 2, 10, now=400)
    pins.spill([on_host])
    assert pins.release(on_host)
    assert not pins.release(on_host)
    pins.spill([pin(pins, 3, 10, now=400)])
    assert len(pins.clear()) == 1
    assert len(pins) == 0
    pins.check()


runs = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
OWNERS = ("", "ann", "ben")


class Machine(RuleBasedStateMachine):
    """Whatever happens, both tiers keep their limits, a pin that did not end is on one of them,
    and ranks that are told the same decide the same."""

    @initialize(
        device=st.integers(0, 16), host=st.integers(0, 24), share=st.sampled_from([0.4, 1.0])
    )
    def begin(self, device: int, host: int, share: float) -> None:
        self.ranks = [
            TieredPins(
                budget_tokens=device, host_budget_tokens=host, owner_share=share, limit_pins=6
            )
            for _ in range(2)
        ]
        self.pins = self.ranks[0]
        self.alive: dict[str, Pin] = {}
        self.now = 0.0

    def on_all(self, name: str, *args: Any, **named: Any) -> Any:
        """Does the same on each rank."""
        done = [getattr(rank, name)(*args, **named) for rank in self.ranks]
        assert repr(done[0]) == repr(done[1])
        return done[0]

    def on_pins(self, name: str, prefixes: list[str]) -> Any:
        done = []
        for rank in self.ranks:
            chosen = [each for each in rank if each.prefix in prefixes]
            chosen.sort(key=lambda each: each.release_order)
            done.append(getattr(rank, name)(chosen if name == "spill" else chosen[0]))
        assert repr(done[0]) == repr(done[1])
        return done[0]

    def settle(self, moved: Moves) -> None:
        assert not set(moved.spilled) & set(moved.ended)
        for each in moved.spilled:
            assert each in self.pins.host
        self.forget(moved.ended)

    def forget(self, ended: list[Pin]) -> None:
        for each in ended:
            del self.alive[each.prefix]

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.forget(self.on_all("expire", self.now, 3))

    @rule(
        tier=st.sampled_from(Tier).filter(lambda tier: tier is not Tier.SHARED),
        tokens=runs,
        owner=st.sampled_from(OWNERS),
        priority=st.sampled_from([0, 0, 1]),
    )
    def grant(self, tier: Tier, tokens: tuple[int, ...], owner: str, priority: int) -> None:
        named = {"owner": owner, "priority": priority}
        granted, moved = self.on_all("grant", tier, "", key(tokens), 20.0, self.now, **named)
        if granted.pin is not None:
            assert granted.is_new == (granted.pin.prefix not in self.alive)
            self.alive[granted.pin.prefix] = granted.pin
            if granted.is_new:
                assert self.pins.tier_of(granted.pin) is tier
        self.settle(moved)
        if granted.pin is not None:
            assert granted.pin in [*self.pins]

    @rule(tokens=runs, read=st.integers(0, 7))
    def hit(self, tokens: tuple[int, ...], read: int) -> None:
        found = self.on_all("hit", "", key(tokens), self.now, read)
        assert [each.tokens for each in found] == sorted({each.tokens for each in found})

    @precondition(lambda self: len(self.pins.device))
    @rule(data=st.data())
    def spill(self, data: st.DataObject) -> None:
        names = [each.prefix for each in self.pins.device]
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        self.settle(self.on_pins("spill", chosen))
        assert not any(each.prefix in chosen for each in self.pins.device)

    @precondition(lambda self: len(self.pins.host))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([each.prefix for each in self.pins.host]))
        before = {each.prefix: self.pins.tier_of(each) for each in self.pins}
        moved = self.on_pins("load", [chosen])
        if moved is None:
            assert {each.prefix: self.pins.tier_of(each) for each in self.pins} == before
        else:
            self.settle(moved)
            assert self.alive[chosen] in self.pins.device

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([*self.alive]))
        assert self.on_pins("release", [chosen])
        del self.alive[chosen]

    @rule(device=st.integers(0, 16), host=st.integers(0, 24), share=st.sampled_from([0.4, 1.0]))
    def change_limits(self, device: int, host: int, share: float) -> None:
        self.settle(self.on_all("change_limits", device, host, share, {}))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pins"):
            for rank in self.ranks:
                rank.check()
            assert {each.prefix: each for each in self.pins} == self.alive
            assert len(self.pins) == len(self.alive)

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.forget(self.pins.clear())
            assert not self.alive
            self.pins.check()


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
