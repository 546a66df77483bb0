"""Pins that spill to the host and come back, on a cache that counts its locks on both tiers."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from radix.residency import Tier
from radix.tiered_pins import TieredPins
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.scheduler.pins import PinKeeper
from tests.engine.scheduler.test_pin_keeper import TTL_S, Cache, Tokens, marked, pressure, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class TieredCache(Cache):
    """A cache with HiCache: what is evicted stays on the host if it has a copy there."""

    def __init__(self, host_tokens: int) -> None:
        super().__init__()
        self.host_tokens = host_tokens
        self.on_host: set[Tokens] = set()
        self.host_locks: dict[int, list[Tokens]] = {}
        self.copied = 0

    # As HostCopies.

    def host_locked(self) -> set[Tokens]:
        return {one for path in self.host_locks.values() for one in path}

    def lock_copy(self, node: int) -> int | None:
        tokens = self._nodes[node]
        path = [tokens[: n + 1] for n in range(len(tokens))]
        new = [one for one in path if one not in self.on_host]
        assert all(one in self.held for one in new), "what is copied was evicted"
        while len(self.on_host) + len(new) > self.host_tokens:
            unlocked = sorted(self.on_host - self.host_locked() - set(path), key=len)
            if not unlocked:
                return None
            self.on_host.remove(unlocked[-1])
        self.on_host |= set(new)
        self.copied += len(new)
        lock = next(self._numbers)
        self.host_locks[lock] = path
        return lock

    def unlock_copy(self, lock: int) -> None:
        del self.host_locks[lock]

    def load(self, req: Any) -> int:
        """What a request reads from both tiers is on the device."""
        tokens = tuple(req.origin_input_ids)
        cached, read = self.held | self.on_host, 0
        while read < len(tokens) and tokens[: read + 1] in cached:
            read += 1
        self.add(req)
        return read


class Copies:
    """`HostCopies` of a `TieredCache`."""

    def __init__(self, cache: TieredCache) -> None:
        self.lock, self.unlock = cache.lock_copy, cache.unlock_copy


def tiered(
    budget: int, host_budget: int, host_tokens: int = 1000, is_entry_rank: bool = False
) -> tuple[TieredCache, PinKeeper]:
    cache = TieredCache(host_tokens)
    pins = TieredPins(budget_tokens=budget, host_budget_tokens=host_budget)
    keeper = PinKeeper(cache, pins, 1, is_entry_rank)  # type: ignore[arg-type]
    keeper.memory.copies = Copies(cache)  # type: ignore[assignment]
    return cache, keeper


def send(keeper: PinKeeper, cache: TieredCache, name: int, tokens: int = 100, **told: Any) -> int:
    """A request that marks its whole prompt. Returns how much of it was cached."""
    req = prompt(name, tokens)
    req.cached_tokens = cache.load(req)
    ends = (WHOLE_PROMPT,) if told.pop("is_marked", True) else ()
    keeper.prompt_stored(req, marked(*ends, **told), tokens)
    check(keeper, cache)
    return int(req.cached_tokens)


def check(keeper: PinKeeper, cache: TieredCache) -> None:
    keeper.pins.check()
    assert sorted(cache.locks) == sorted(pin.label.lock for pin in keeper.pins.device)
    assert sorted(cache.host_locks) == sorted(pin.label.copy for pin in keeper.pins.host)
    for pin in keeper.pins:
        on_device = pin in keeper.pins.device
        assert (pin.label.lock is not None, pin.label.copy is None) == (on_device, on_device)
        assert pin.label.tier == keeper.pins.tier_of(pin)
    assert len(cache.locked()) == keeper.tokens
    assert len(cache.host_locked()) == keeper.pins.host.tokens


def tiers(keeper: PinKeeper) -> dict[int, Tier]:
    """The tier of each pin, by the second in which it was granted."""
    return {int(pin.granted_s): pin.label.tier for pin in keeper.pins}


def test_a_displaced_pin_spills_and_the_request_that_reads_it_brings_it_back() -> None:
    cache, keeper = tiered(budget=100, host_budget=300)
    for second in (1, 2, 3):
        send(keeper, cache, second, sent_s=second)
    assert tiers(keeper) == {1: HOST, 2: HOST, 3: DEVICE}
    cache.evict()
    assert send(keeper, cache, 1, sent_s=4, is_marked=False) == 100
    assert tiers(keeper) == {1: DEVICE, 2: HOST, 3: HOST}
    assert [pin.hits for pin in keeper.pins.device] == [1]
    assert cache.copied == 300, "each was copied once"
    send(keeper, cache, 2, sent_s=5, is_marked=False)
    assert cache.copied == 300, "the copy of the first was still there"


def test_leases_sessions_and_deletions_end_pins_on_the_host() -> None:
    cache, keeper = tiered(budget=100, host_budget=300)
    for second in (1, 2, 3):
        send(keeper, cache, second, sent_s=second, session=f"s{second}")
    keeper.end_session(marked(session="s1"))
    check(keeper, cache)
    assert tiers(keeper) == {2: HOST, 3: DEVICE}
    keeper.release_named([pin.prefix for pin in keeper.pins.host])
    check(keeper, cache)
    assert tiers(keeper) == {3: DEVICE}
    send(keeper, cache, 4, sent_s=4)
    keeper.advance(4 + TTL_S)
    assert cache.locks == cache.host_locks == {}
    assert len(keeper.pins) == 0


def test_a_demoted_prompt_loses_its_spilled_pin() -> None:
    cache, keeper = tiered(budget=100, host_budget=300)
    send(keeper, cache, 1, sent_s=1)
    send(keeper, cache, 2, sent_s=2)
    demoted = marked(sent_s=3, is_reusable=False)._replace(is_demoted=True)
    keeper.prompt_stored(prompt(1, 100), demoted, 100)
    check(keeper, cache)
    assert tiers(keeper) == {2: DEVICE}


def test_a_flush_forgets_both_tiers_and_unlocks_nothing() -> None:
    cache, keeper = tiered(budget=100, host_budget=300)
    for second in (1, 2):
        send(keeper, cache, second, sent_s=second)
    for table in (cache.locks, cache.host_locks, cache.held, cache.on_host):
        table.clear()
    keeper.forget_all()
    check(keeper, cache)
    assert send(keeper, cache, 1, sent_s=3) == 0


def test_pressure_spills_the_fewest_pins_and_copies_no_others() -> None:
    cache, keeper = tiered(budget=1000, host_budget=1000)
    for second in range(1, 6):
        send(keeper, cache, second, sent_s=second)
    pressure(cache, keeper).make_room(lambda: cache.full_evictable_size() >= 150)
    check(keeper, cache)
    assert tiers(keeper) == {1: HOST, 2: HOST, 3: DEVICE, 4: DEVICE, 5: DEVICE}
    assert cache.copied == 200
    req = asking(9)
    assert pressure(cache, keeper).admit(req, fits_after_eviction(cache, 251))
    check(keeper, cache)
    assert [tier for tier in tiers(keeper).values() if tier is DEVICE] == [DEVICE] * 2
    assert cache.copied == 300


def asking(name: int) -> Any:
    req = prompt(name, 10)
    req.needs_host_load_back = lambda: False
    return req


def fits_after_eviction(cache: TieredCache, tokens: int) -> Any:
    """SGLang's admission, which evicts for what it adds."""

    def fits() -> bool:
        if cache.full_evictable_size() < tokens:
            return False
        cache.evict()
        return True

    return fits


def test_a_request_that_may_not_fit_copies_nothing() -> None:
    cache, keeper = tiered(budget=1000, host_budget=1000)
    for second in range(1, 6):
        send(keeper, cache, second, sent_s=second)
    assert not pressure(cache, keeper).admit(asking(9), lambda: True, may_fit=lambda: False)
    check(keeper, cache)
    assert cache.copied == 0
    assert set(tiers(keeper).values()) == {DEVICE}
    assert not pressure(cache, keeper).admit(asking(9), lambda: False)
    check(keeper, cache)
    assert set(tiers(keeper).values()) == {DEVICE}


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_a_try_that_evicts_and_fails_spills_what_it_evicted_and_nothing_else(tries: int) -> None:
    cache, keeper = tiered(budget=1000, host_budget=1000)
    for name in (1, 2, 3):
        send(keeper, cache, name, 100 * name, sent_s=name)
    seen = []

    def evicts() -> bool:
        seen.append(len(cache.locks))
        if len(seen) <= tries:
            cache.evict()
        return False

    assert not pressure(cache, keeper).admit(asking(9), evicts)
    check(keeper, cache)
    assert [*tiers(keeper).values()].count(HOST) == tries
    assert len(keeper.pins) == 3


def test_a_prefix_that_the_device_has_no_room_for_is_pinned_on_the_host() -> None:
    cache, keeper = tiered(budget=50, host_budget=300)
    send(keeper, cache, 1, 100, sent_s=1)
    assert tiers(keeper) == {1: HOST}
    cache.evict()
    assert send(keeper, cache, 1, 100, sent_s=2) == 100
    assert tiers(keeper) == {1: HOST}, "the device still has no room for it"
    assert [pin.hits for pin in keeper.pins] == [1]


def counted(name: str, *labels: str) -> float:
    made = counter(name)
    return float((made.labels(*labels) if labels else made)._value.get())


def test_what_finds_no_room_on_the_host_ends_as_without_one_and_is_counted() -> None:
    def rejected() -> list[float]:
        reasons = ("host memory", "budget", "model")
        return [counted("spills_rejected", reason) for reason in reasons]

    before = rejected()
    cache, keeper = tiered(budget=100, host_budget=1000, host_tokens=99, is_entry_rank=True)
    for second in (1, 2):
        send(keeper, cache, second, sent_s=second)
    assert tiers(keeper) == {2: DEVICE}
    cache, keeper = tiered(budget=100, host_budget=50, is_entry_rank=True)
    for second in (1, 2):
        send(keeper, cache, second, sent_s=second)
    assert tiers(keeper) == {2: DEVICE}
    cache, keeper = tiered(budget=100, host_budget=0, is_entry_rank=True)
    keeper.memory.copies, keeper.cannot_spill = None, "model"
    for second in (1, 2):
        send(keeper, cache, second, sent_s=second)
    pressure(cache, keeper).make_room(lambda: False)
    assert tiers(keeper) == {}
    assert [now - then for now, then in zip(rejected(), before, strict=True)] == [1, 1, 2]


def test_moves_are_counted_and_published() -> None:
    before = [counted(name) for name in ("pins_spilled", "pins_loaded")]
    cache, keeper = tiered(budget=100, host_budget=300, is_entry_rank=True)
    send(keeper, cache, 1, sent_s=1)
    send(keeper, cache, 2, sent_s=2)
    (spilled,) = keeper.pins.host
    assert keeper.changed[spilled.prefix] is spilled
    keeper.changed.clear()
    send(keeper, cache, 1, sent_s=3)
    assert set(keeper.changed) == {pin.prefix for pin in keeper.pins}
    after = [counted(name) for name in ("pins_spilled", "pins_loaded")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 1]


def test_smaller_budgets_spill_and_end() -> None:
    cache, keeper = tiered(budget=300, host_budget=300)
    for second in (1, 2, 3):
        send(keeper, cache, second, sent_s=second)
    keeper.change_limits(100, 100, 1.0, {})
    check(keeper, cache)
    assert tiers(keeper) == {2: HOST, 3: DEVICE}
    keeper.change_limits(0, 0, 1.0, {})
    check(keeper, cache)
    assert tiers(keeper) == {}


def test_what_a_request_matched_on_the_host_is_kept_while_room_is_made_for_copies() -> None:
    cache, keeper = tiered(budget=300, host_budget=300)
    kept: list[Any] = []

    class Receipt:
        def to_dec_params(self) -> str:
            return "receipt"

    cache.inc_host_lock_ref = lambda node: kept.append(node) or Receipt()  # type: ignore[attr-defined]
    cache.dec_host_lock_ref = lambda node, receipt: kept.remove(node)  # type: ignore[attr-defined]
    send(keeper, cache, 1, sent_s=1)
    req = prompt(9, 10)
    req.needs_host_load_back, req.best_match_node = (lambda: True), 77
    seen: list[list[Any]] = []
    assert pressure(cache, keeper).admit(req, lambda: seen.append([*kept]) or True)
    assert (seen, kept) == ([[77]], [])


@pytest.mark.long
def test_whatever_happens_every_pin_is_locked_once_on_one_tier() -> None:
    source = random.Random(7)
    numbers = count(1)
    for _ in range(50):
        budgets = (source.choice([0, 100, 300]), source.choice([0, 200, 600]))
        cache, keeper = tiered(*budgets, host_tokens=source.choice([150, 700]))
        for second in range(1, 80):
            name, tokens = source.randrange(8), source.randrange(1, 150)
            told = {"session": str(source.randrange(4)), "is_marked": source.random() < 0.8}
            send(keeper, cache, name, tokens, sent_s=second * 15, **told)
            wanted, act = source.randrange(1, 200), source.randrange(6)
            if act == 0:
                pressure(cache, keeper).make_room(lambda: cache.full_evictable_size() >= wanted)  # noqa: B023
            elif act == 1:
                pressure(cache, keeper).admit(
                    asking(next(numbers)), fits_after_eviction(cache, wanted)
                )
            elif act == 2:
                keeper.end_session(marked(session="1"))
            elif act == 3:
                keeper.change_limits(source.choice([50, 300]), source.choice([50, 600]), 1.0, {})
            else:
                cache.evict()
            check(keeper, cache)
        keeper.advance(1e9)
        assert cache.locks == cache.host_locks == {}
