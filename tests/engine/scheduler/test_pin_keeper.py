"""Pins as locks, and what memory pressure takes of them, on a cache that counts its locks."""

from __future__ import annotations

import random
import warnings
from array import array
from collections.abc import Callable
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from radix.tiered_pins import TieredPins
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.scheduler import admission
from sgl_ext.engine.scheduler.pins import PinKeeper, PinPressure
from sgl_ext.wire.hints import Hints

TTL_S = 300.0
Tokens = tuple[int, ...]


class Cache:
    """A tree that holds prompts; what no lock covers can be evicted."""

    def __init__(self, useful: int | None = None) -> None:
        self.held: set[Tokens] = set()  # every prefix of every prompt
        self.locks: dict[int, Tokens] = {}
        self._nodes: dict[int, Tokens] = {}
        self._numbers = count(1)
        self._useful = useful
        self.pressure: PinPressure | None = None

    def match_until(self, req: Any, tokens: int) -> tuple[int, int]:
        tokens = tokens if self._useful is None else min(tokens, self._useful)
        node = next(self._numbers)
        self._nodes[node] = tuple(req.origin_input_ids[:tokens])
        return tokens, node

    def lock(self, node: int) -> int:
        lock = next(self._numbers)
        self.locks[lock] = self._nodes[node]
        assert self.locks[lock] in self.held, "what is locked was evicted"
        return lock

    def unlock(self, lock: int | None) -> None:
        if lock is not None:
            del self.locks[lock]  # a KeyError: it was unlocked already

    def locked(self) -> set[Tokens]:
        return {tokens[: n + 1] for tokens in self.locks.values() for n in range(len(tokens))}

    def full_evictable_size(self) -> int:
        return len(self.held - self.locked())

    def swa_evictable_size(self) -> int:
        return 0

    mamba_evictable_size = swa_evictable_size

    def evict(self) -> None:
        self.held &= self.locked()

    def is_evicted(self, node: int) -> bool:
        return self._nodes[node] not in self.held

    def add(self, req: Any) -> None:
        tokens = tuple(req.origin_input_ids)
        self.held |= {tokens[: n + 1] for n in range(len(tokens))}


def keeper_of(cache: Cache, budget: int = 1000, page: int = 1) -> PinKeeper:
    pins = TieredPins(budget_tokens=budget, page=page)
    return PinKeeper(cache, pins, page, is_entry_rank=False)


def pressure(cache: Cache, keeper: PinKeeper) -> PinPressure:
    """What takes the pins of this cache, always the same."""
    if cache.pressure is None:
        cache.pressure = PinPressure(cache, keeper)  # type: ignore[arg-type]
    return cache.pressure


def prompt(name: int, tokens: int, cached: int = 0) -> Any:
    """A prompt of which no other name has any token."""
    ids = [name * 10_000 + at for at in range(tokens)]
    return SimpleNamespace(
        origin_input_ids=ids,
        extra_key=None,
        cache_salt=None,
        cached_tokens=cached,
        priority=None,
        kv_hints=None,
    )


def marked(*ends: int, sent_s: float = 1.0, session: str = "s", is_reusable: bool = True) -> Hints:
    return Hints(
        hashes=(),
        ends=(),
        pins=tuple((end, TTL_S) for end in ends),
        owner="",
        session=session,
        sent_s=sent_s,
        is_reusable=is_reusable,
        is_last=False,
        is_answer_reusable=True,
    )


def pin(keeper: PinKeeper, cache: Cache, req: Any, *ends: int, **told: Any) -> None:
    cache.add(req)
    keeper.prompt_stored(req, marked(*ends, **told), len(req.origin_input_ids))
    assert_locked_once(keeper, cache)


def assert_locked_once(keeper: PinKeeper, cache: Cache) -> None:
    keeper.pins.check()
    assert sorted(cache.locks) == sorted(held.label.lock for held in keeper.pins)
    assert len(cache.locked()) == keeper.tokens


def pinned(keeper: PinKeeper) -> list[int]:
    return sorted(held.tokens for held in keeper.pins)


def test_a_mark_is_pinned_once_it_is_resident_and_not_before() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    req = prompt(1, 100)
    cache.add(req)
    for resident, tokens in ((39, []), (40, [40]), (99, [40]), (100, [40, 100])):
        keeper.prompt_stored(req, marked(40, WHOLE_PROMPT), resident)
        assert pinned(keeper) == tokens
        assert_locked_once(keeper, cache)


def test_chunks_between_two_marks_do_not_copy_the_prompt() -> None:
    class Ids(array):  # type: ignore[type-arg]
        copied = 0

        def tobytes(self) -> bytes:
            Ids.copied += 1
            return super().tobytes()

    cache = Cache()
    keeper = keeper_of(cache)
    req = prompt(1, 100)
    cache.add(req)
    req.origin_input_ids = Ids("q", req.origin_input_ids)
    for resident in range(1, 101):
        keeper.prompt_stored(req, marked(40, WHOLE_PROMPT), resident)
    assert pinned(keeper) == [40, 100]
    assert Ids.copied == 3, "for the first chunk, and for each that reaches a mark"


def test_a_mark_within_a_page_is_pinned_up_to_the_page_and_less_than_one_is_not() -> None:
    cache = Cache()
    keeper = keeper_of(cache, page=16)
    pin(keeper, cache, prompt(1, 100), 15, 47)
    assert pinned(keeper) == [32]
    keeper.prompt_stored(prompt(2, 100), marked(98, WHOLE_PROMPT), resident=95)
    assert pinned(keeper) == [32]
    req = prompt(2, 100)
    cache.add(req)
    keeper.prompt_stored(req, marked(98, WHOLE_PROMPT), resident=96)
    assert pinned(keeper) == [32, 96]
    assert_locked_once(keeper, cache)


def test_prefixes_share_whole_pages_alone() -> None:
    cache = Cache()
    keeper = keeper_of(cache, page=16)
    for last in (1, 2):
        req = prompt(1, 100)
        req.origin_input_ids[40:] = [last] * 60
        cache.add(req)
        keeper.prompt_stored(req, marked(WHOLE_PROMPT), 96)
        keeper.pins.check()
    assert keeper.tokens == 96 + 64


def test_only_what_is_of_use_is_locked() -> None:
    cache = Cache(useful=30)
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 100), 40)
    assert pinned(keeper) == [30]
    nothing = Cache(useful=0)
    keeper = keeper_of(nothing)
    pin(keeper, nothing, prompt(1, 100), 40)
    assert pinned(keeper) == []


def test_the_same_mark_again_is_one_lock() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    for now_s in range(5):
        pin(keeper, cache, prompt(1, 100, cached=50), 40, WHOLE_PROMPT, sent_s=now_s)
    assert len(cache.locks) == 2
    assert [held.hits for held in keeper.pins] == [4, 0]


def test_a_request_that_is_not_reusable_reads_and_pins_nothing() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 100), 40)
    pin(keeper, cache, prompt(1, 100, cached=40), 80, is_reusable=False)
    assert [(held.tokens, held.hits) for held in keeper.pins] == [(40, 1)]


def test_time_displacement_deletion_and_an_ended_session_unlock() -> None:
    cache = Cache()
    keeper = keeper_of(cache, budget=100)
    pin(keeper, cache, prompt(1, 60), WHOLE_PROMPT)
    pin(keeper, cache, prompt(2, 60), WHOLE_PROMPT, sent_s=2)
    assert [held.granted_s for held in keeper.pins] == [2]
    keeper.release_named([held.prefix for held in keeper.pins] * 2 + ["unknown"])
    assert cache.locks == {}
    pin(keeper, cache, prompt(3, 60), 30, WHOLE_PROMPT, sent_s=3)
    keeper.advance(3 + TTL_S)
    assert cache.locks == {}
    pin(keeper, cache, prompt(4, 60), 30, WHOLE_PROMPT, sent_s=400)
    pin(keeper, cache, prompt(4, 30, cached=30), sent_s=401, session="another")
    keeper.end_session(marked(session="s")._replace(owner="another tenant"))
    assert pinned(keeper) == [30, 60], "a session is its tenant's, whatever others call theirs"
    keeper.end_session(marked(session="s"))
    assert pinned(keeper) == [30], "what another session read is not for this one to end"
    assert_locked_once(keeper, cache)


def test_a_demoted_prompt_loses_the_session_s_own_pins() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 60), 30, WHOLE_PROMPT)
    pin(keeper, cache, prompt(2, 40), WHOLE_PROMPT)
    pin(keeper, cache, prompt(1, 30, cached=30), session="another")
    demoted = marked(is_reusable=False)._replace(is_demoted=True)
    keeper.prompt_stored(prompt(1, 60), demoted._replace(owner="another tenant"), 60)
    assert pinned(keeper) == [30, 40, 60]
    keeper.prompt_stored(prompt(1, 60), demoted, 60)
    assert pinned(keeper) == [30, 40], "another session reads the first, and the last is another's"
    assert_locked_once(keeper, cache)


def turn(kind: str, *ends: int, conversation: str = "c") -> Hints:
    return marked(*ends)._replace(turn=kind, conversation=conversation)


def summed_up() -> tuple[PinKeeper, Cache]:
    """A keeper with pins on a conversation of 60 tokens whose summary, pinned, was asked for."""
    cache = Cache()
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 60), 10, 60)
    asked = prompt(1, 70, cached=60)
    cache.add(asked)
    keeper.prompt_stored(asked, turn("compaction", 10, 70), 70)
    assert pinned(keeper) == [10, 60, 70]
    return keeper, cache


def test_a_conversation_that_goes_on_from_its_summary_leaves_its_pins_behind() -> None:
    keeper, cache = summed_up()
    other = prompt(2, 30)
    cache.add(other)
    keeper.prompt_stored(other, turn("main", conversation="another"), 30)
    assert pinned(keeper) == [10, 60, 70], "another conversation proves nothing"
    after = prompt(1, 10)
    after.origin_input_ids = [*after.origin_input_ids, *other.origin_input_ids]
    cache.add(after)
    keeper.prompt_stored(after, turn("main", 10), 40)
    assert pinned(keeper) == [10], "what both have stays"
    assert_locked_once(keeper, cache)


def test_a_conversation_that_goes_on_from_before_its_summary_keeps_its_pins() -> None:
    keeper, cache = summed_up()
    again = prompt(1, 60)
    cache.add(again)
    keeper.prompt_stored(again, turn("main", 60), 60)
    assert pinned(keeper) == [10, 60], "only the summary's own is left behind"
    new = prompt(3, 20)
    cache.add(new)
    keeper.prompt_stored(new, turn("main"), 20)
    assert pinned(keeper) == [10, 60], "it was proven to go on"
    assert_locked_once(keeper, cache)


def test_what_is_kept_of_summaries_is_bounded() -> None:
    keeper, _ = summed_up()
    for number in range(1000):
        keeper.prompt_stored(prompt(1, 70), turn("compaction", conversation=f"{number}"), 70)
    keeper.prompt_stored(prompt(3, 20), turn("main"), 20)
    assert pinned(keeper) == [10, 60, 70]


def test_a_prefix_beyond_the_budget_is_rejected_and_not_locked() -> None:
    cache = Cache()
    keeper = keeper_of(cache, budget=50)
    pin(keeper, cache, prompt(1, 60), 20, WHOLE_PROMPT)
    assert pinned(keeper) == [20]


def test_memory_is_freed_by_the_fewest_pins_least_valuable_first() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    for name in range(1, 6):
        pin(keeper, cache, prompt(name, 100), WHOLE_PROMPT, sent_s=name)
    pressure(cache, keeper).make_room(lambda: True)
    assert len(cache.locks) == 5
    pressure(cache, keeper).make_room(lambda: cache.full_evictable_size() >= 150)
    assert [held.granted_s for held in keeper.pins] == [3, 4, 5]
    assert_locked_once(keeper, cache)


def test_a_pin_that_frees_nothing_stays() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 100), 40, WHOLE_PROMPT)
    pin(keeper, cache, prompt(2, 50), WHOLE_PROMPT, sent_s=2)
    _, node = cache.match_until(prompt(2, 50), 50)
    request = cache.lock(node)
    pressure(cache, keeper).make_room(lambda: cache.full_evictable_size() >= 50)
    assert pinned(keeper) == [40, 50], "the shorter of the first prompt frees nothing by itself"
    pressure(cache, keeper).make_room(lambda: cache.full_evictable_size() >= 1000)
    assert pinned(keeper) == [50], "a request holds the other one as well"
    cache.unlock(request)
    assert_locked_once(keeper, cache)


def test_a_request_is_admitted_at_the_price_of_the_pins_it_needs() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    for name in range(1, 6):
        pin(keeper, cache, prompt(name, 100), WHOLE_PROMPT, sent_s=name)
    assert pressure(cache, keeper).admit(prompt(9, 10), lambda: cache.full_evictable_size() >= 101)
    assert [held.granted_s for held in keeper.pins] == [3, 4, 5]
    assert_locked_once(keeper, cache)


def test_a_request_that_never_fits_costs_no_pin() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    for name in range(1, 6):
        pin(keeper, cache, prompt(name, 100), 50, WHOLE_PROMPT, sent_s=name)
    before = list(keeper.pins)
    asked: list[int] = []

    def fits() -> bool:
        asked.append(cache.full_evictable_size())
        return False

    assert not pressure(cache, keeper).admit(prompt(9, 10), fits)
    assert asked[-1] == 500, "it was asked without any pin as well"
    assert list(keeper.pins) == before
    assert_locked_once(keeper, cache)


def test_a_request_is_not_admitted_at_the_price_of_what_it_reads() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 100), 50, WHOLE_PROMPT)
    assert not pressure(cache, keeper).admit(
        prompt(1, 200), lambda: cache.full_evictable_size() > 0
    )
    assert pinned(keeper) == [50, 100]


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_a_try_that_evicts_and_fails_ends_the_pins_that_it_evicted_and_no_other(
    tries: int,
) -> None:
    """With HiCache a try brings tokens back from the host, for which it evicts."""
    cache = Cache()
    keeper = keeper_of(cache)
    for name in (1, 2, 3):
        pin(keeper, cache, prompt(name, 100 * name), WHOLE_PROMPT)
    seen = []

    def evicts() -> bool:
        seen.append(len(cache.locks))
        if len(seen) <= tries:
            cache.evict()
            pressure(cache, keeper).make_room(lambda: False)  # as the cache does after an eviction
        return False

    assert not pressure(cache, keeper).admit(prompt(4, 10), evicts)
    assert seen == [2, 1, 0]
    assert len(keeper.pins) == 3 - tries
    assert_locked_once(keeper, cache)


def test_a_flush_forgets_pins_and_unlocks_none() -> None:
    cache = Cache()
    keeper = keeper_of(cache)
    pin(keeper, cache, prompt(1, 100), 50, WHOLE_PROMPT)
    cache.locks.clear()
    keeper.forget_all()
    assert len(keeper.pins) == keeper.tokens == 0
    assert not keeper.changed, "a rank that does not tell has nothing to tell"
    pin(keeper, cache, prompt(1, 100), 50)


@pytest.mark.long
def test_whatever_happens_every_pin_is_locked_once_and_nothing_else() -> None:
    source = random.Random(5)
    for _ in range(50):
        cache = Cache()
        keeper = keeper_of(cache, budget=300, page=source.choice((1, 16)))
        for now_s in range(1, 60):
            req = prompt(source.randrange(6), source.randrange(1, 150))
            req.cached_tokens = len(req.origin_input_ids) // 2
            ends = sorted(source.choices(range(1, len(req.origin_input_ids) + 1), k=2))
            pin(keeper, cache, req, *ends, sent_s=now_s * 20, session=str(source.randrange(4)))
            wanted = source.randrange(1, 200)

            def is_enough(cache: Cache = cache, wanted: int = wanted) -> bool:
                return cache.full_evictable_size() >= wanted

            doing: list[Callable[[], object]] = [
                lambda: pressure(cache, keeper).make_room(is_enough),  # noqa: B023
                lambda: pressure(cache, keeper).admit(req, is_enough),  # noqa: B023
                lambda: keeper.end_session(marked(session="1")),  # noqa: B023
                cache.evict,
                lambda: None,
            ]
            source.choice(doing)()
            assert_locked_once(keeper, cache)
        keeper.advance(1e9)
        assert cache.locks == {}


class Adder:
    """SGLang's admission: what is added shows in the list, and the verdict is on what is next."""

    def __init__(self, cache: Cache, keeper: PinKeeper, free: int) -> None:
        self.tree_cache = SimpleNamespace(
            pins=keeper,
            pressure=pressure(cache, keeper),
            disable=False,
            supports_mamba=lambda: False,
        )
        self.running_batch = None
        self.can_run_list: list[Any] = []
        self.new_chunked_req = None
        self.offset = 0
        self._cache = cache
        self._free = free

    @property
    def rem_total_tokens(self) -> int:
        return self._free + self._cache.full_evictable_size() - self.offset

    def add_one_req(self, req: Any, has_chunked_req: bool, reserved: int = 0) -> Any:
        results = _results()
        wanted = len(req.full_untruncated_fill_ids)
        if wanted >= self.rem_total_tokens:
            return results.NO_TOKEN
        self.can_run_list.append(req)
        self.offset += wanted + reserved
        return results.CONTINUE if self.rem_total_tokens > 0 else results.NO_TOKEN


def _results() -> Any:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        return import_module("sglang.srt.managers.schedule_policy").AddReqResult


def asking(name: int, tokens: int) -> Any:
    req = prompt(name, tokens)
    req.full_untruncated_fill_ids, req.prefix_len = req.origin_input_ids, 0
    req.session, req.beam_group, req.return_logprob = None, None, False
    req.host_hit_length = req.host_loaded_length = 0
    return req


@pytest.fixture
def five() -> tuple[Cache, PinKeeper]:
    """Five pins of 100 tokens each."""
    _results()
    cache = Cache()
    keeper = keeper_of(cache)
    for name in range(1, 6):
        pin(keeper, cache, prompt(name, 100), WHOLE_PROMPT, sent_s=name)
    return cache, keeper


@pytest.mark.parametrize(("tokens", "left"), [(40, 5), (140, 4), (350, 1), (560, 5)])
def test_admission_gives_up_what_is_needed_and_nothing_for_what_cannot_be(
    five: tuple[Cache, PinKeeper], tokens: int, left: int
) -> None:
    cache, keeper = five
    adder, req = Adder(cache, keeper, free=50), asking(9, tokens)
    result = admission.add_one(Adder.add_one_req, adder, req, has_chunked_req=False)
    assert adder.can_run_list == ([req] if tokens < 550 else [])
    assert (result is _results().CONTINUE) == (tokens < 550)
    assert len(keeper.pins) == left
    assert_locked_once(keeper, cache)


@pytest.mark.parametrize("tokens", [40, 140])
def test_a_request_is_added_once_though_nothing_is_left_for_the_next(
    five: tuple[Cache, PinKeeper], tokens: int
) -> None:
    cache, keeper = five
    adder, req = Adder(cache, keeper, free=50), asking(9, tokens)
    result = admission.add_one(Adder.add_one_req, adder, req, has_chunked_req=False, reserved=60)
    assert adder.can_run_list == [req]
    assert result is _results().CONTINUE, "the next one may have pins given up for it"
    assert len(keeper.pins) == (5 if tokens == 40 else 4)
