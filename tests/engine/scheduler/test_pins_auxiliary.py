"""Pins on models that keep more than keys and values: a sliding window's, or a Mamba state.

SGLang's own pools, allocators and both its tree cores, without an engine: requests take and
give back memory here as its scheduler has them do.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.hints import Hints
from tests.sglang_versions import needs_newest

TOKENS, WINDOWED, SLOTS = 1200, 400, 24
WINDOW, CHUNK = 16, 64
NUMBERS = count(1)


def sglang(module: str) -> Any:
    return loaded(f"sglang.srt.{module}")


def loaded(module: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        return import_module(module)


class Model:
    """The cache of one kind of model, and both kinds of its memory.

    states: of what it keeps besides keys and values; a window's are counted in tokens.
    """

    def __init__(self, kind: str, core: str) -> None:
        self.part = kind
        self._states = SLOTS if kind == "mamba" else WINDOWED
        parts = sglang("mem_cache.unified_cache.component_type").ComponentType
        tree = (parts.FULL, parts[kind.upper()])
        allocator = self._with_slots() if kind == "mamba" else self._with_window()
        params = sglang("mem_cache.cache_init_params").CacheInitParams(
            False, self.rows, allocator, 1, tree_components=tree, tree_core_backend=core
        )
        params.sliding_window_size = WINDOW
        self.cache = loaded("sgl_ext.engine.scheduler.radix_cache").ExtendedRadixCache(params)
        self.keeper = self.cache.pins
        assert self.cache._tree_core_backend == core

    def _with_window(self) -> Any:
        half, pools = import_module("torch").float16, sglang("mem_cache.memory_pool")
        self.rows = pools.ReqToTokenPool(8, TOKENS, "cpu", enable_memory_saver=False)
        pool = sglang("mem_cache.swa_memory_pool").SWAKVPool(
            TOKENS, WINDOWED, 1, half, 1, 2, [0], [1], "cpu"
        )
        return sglang("mem_cache.allocator.swa").SWATokenToKVPoolAllocator(
            TOKENS, WINDOWED, 1, half, "cpu", pool, need_sort=False
        )

    def _with_slots(self) -> Any:
        half, pools = import_module("torch").float16, sglang("mem_cache.memory_pool")
        shapes = sglang("configs.mamba_utils")
        shape = shapes.Mamba2StateShape.create_full_rank(
            tp_world_size=1, intermediate_size=8, state_size=4, conv_kernel=4
        )
        self.rows = pools.HybridReqToTokenPool(
            size=8,
            mamba_size=SLOTS,
            mamba_spec_state_size=0,
            max_context_len=TOKENS,
            device="cpu",
            enable_memory_saver=False,
            cache_params=shapes.Mamba2CacheParams(shape=shape, layers=[0]),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=False,
        )
        pool = pools.HybridLinearKVPool(TOKENS, half, 1, 1, 2, [1], "cpu", self.rows.mamba_pool)
        allocator = sglang("mem_cache.allocator.token").TokenToKVPoolAllocator
        return allocator(TOKENS, half, "cpu", pool, need_sort=False)

    @property
    def free(self) -> int:
        """How many states are neither held by the tree nor by a request."""
        if self.part == "mamba":
            return int(self.rows.mamba_allocator.available_size())
        return int(self.cache.token_to_kv_pool_allocator.swa_available_size())

    def states(self, what: str) -> int:
        return int(getattr(self.cache, f"{self.part}_{what}_size")())

    @property
    def locked(self) -> tuple[int, int]:
        return self.cache.full_protected_size(), self.states("protected")

    def evict(self, tokens: int = 0, states: int = 0) -> None:
        amounts = (tokens, states, 0) if self.part == "swa" else (tokens, 0, states)
        self.cache.evict(sglang("mem_cache.base_prefix_cache").EvictParams(*amounts))

    def assert_nothing_lost(self) -> None:
        """While no request runs."""
        cache, allocator = self.cache, self.cache.token_to_kv_pool_allocator
        free = allocator.full_available_size if self.part == "swa" else allocator.available_size
        assert free() + cache.full_evictable_size() + cache.full_protected_size() == TOKENS
        assert self.free + self.states("evictable") + self.states("protected") == self._states
        cache.sanity_check()
        self.keeper.pins.check()

    def matched(self, ids: list[int]) -> int:
        """How much of a prompt a request could use."""
        req = SimpleNamespace(origin_input_ids=array("q", ids), extra_key=None, cache_salt=None)
        return int(self.cache.match_until(req, len(ids))[0])

    @contextmanager
    def running(
        self, ids: list[int], *pins: int, sent_s: float = 1.0, session: str = ""
    ) -> Iterator[Any]:
        """A request whose prompt is computed in chunks, and that ends when this does."""
        cache, allocation = self.cache, sglang("mem_cache.allocation")
        batch = sglang("managers.schedule_batch")
        req = batch.Req(str(next(NUMBERS)), "", array("q", ids), batch.SamplingParams())
        told = tuple((end, 300.0) for end in pins)
        hints = Hints((), (), told, "", "s", sent_s, True, False, True, conversation=session)
        req.sgl_ext = RequestState(hints)
        req.init_next_round_input(cache)
        req.lock = cache.lock(req.last_node)
        allocation.alloc_req_slots(self.rows, [req], cache)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        req.cached_tokens = at = req.prefix_len
        row[:at] = cache.prefix_device_indices(req)
        while at < len(ids):
            end = min(at - at % CHUNK + CHUNK, len(ids))
            row[at:end] = allocation.alloc_token_slots(cache, end - at)
            req.kv.kv_allocated_len = req.kv.kv_committed_len = at = end
            cache.checkpoint(req, up_to=end)
        yield req
        req.finished_reason = batch.FINISH_LENGTH(0)
        sglang("mem_cache.common").release_kv_cache(req, cache, checkpoint=True)

    def serve(self, ids: list[int], *pins: int, sent_s: float = 1.0, session: str = "") -> int:
        """Runs a request; how much of its prompt it read."""
        with self.running(ids, *pins, sent_s=sent_s, session=session) as req:
            pass
        self.assert_nothing_lost()
        return int(req.cached_tokens)

    def flood(self) -> None:
        for _ in range(2 * TOKENS // 100):
            self.serve(prompt(100))


def prompt(tokens: int) -> list[int]:
    """A prompt of which no other has any token."""
    return [next(NUMBERS) for _ in range(tokens)]


@pytest.fixture(params=["swa-rust", "swa-python", "mamba-rust", "mamba-python"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: True)
    monkeypatch.setenv(*EngineSettings(pin_budget=0.9).to_environment().popitem())
    context = sglang("runtime_context").get_context()
    sglang("arg_groups.pipeline")  # imported here, where its warnings are no errors
    with context.override_server_args(_mamba_cache_chunk_size=CHUNK):
        yield Model(*request.param.split("-"))


def test_a_pinned_prompt_outlasts_a_flood_and_its_twin_does_not(model: Model) -> None:
    kept, twin = prompt(100), prompt(100)
    model.serve(kept, WHOLE_PROMPT)
    model.serve(twin)
    locked = model.locked
    assert locked == (100, 1 if model.part == "mamba" else WINDOW)
    model.flood()
    assert model.locked == locked
    assert (model.matched(kept), model.matched(twin)) == (100, 0)
    assert model.serve(kept + prompt(20)) == 100, "a request reads all of it"
    model.keeper.advance(1000.0)
    assert model.locked == (0, 0)
    model.evict(TOKENS, 1000)
    assert model.matched(kept) == 0
    assert (model.cache.full_evictable_size(), model.states("evictable")) == (0, 0)
    model.assert_nothing_lost()


def test_a_mark_without_a_cached_state_pins_the_usable_prefix_or_is_rejected(model: Model) -> None:
    """A window or state is kept where a chunk ends, and a prompt."""
    refused = counter("pins_rejected").labels("nothing to lock")
    before = refused._value.get()
    ids = prompt(150)
    model.serve(ids, 30, 100, WHOLE_PROMPT)
    assert sorted(pin.tokens for pin in model.keeper.pins) == [CHUNK, 150]
    assert refused._value.get() == before + 1
    model.flood()
    assert [model.matched(ids[:end]) for end in (30, 100, 150)] == [0, CHUNK, 150]


def test_want_of_states_alone_costs_as_few_pins_as_do(model: Model) -> None:
    prompts = [prompt(30) for _ in range(6)]
    for sent_s, ids in enumerate(prompts):
        model.serve(ids, WHOLE_PROMPT, sent_s=sent_s)
    one = model.states("protected") // 6
    free = model.free + model.states("evictable")
    model.evict(states=model.states("evictable"))
    assert (len(model.keeper.pins), model.free) == (6, free), "what was evictable was enough"
    model.evict(states=2 * one)
    assert (len(model.keeper.pins), model.free) == (4, free + 2 * one)
    assert [model.matched(ids) for ids in prompts] == [0, 0, 30, 30, 30, 30]
    model.assert_nothing_lost()


@needs_newest("it evicts by amounts alone")
def test_memory_that_all_kinds_share_is_had_for_as_few_pins_as_do(model: Model) -> None:
    """With --enable-unified-memory SGLang evicts until an allocation is possible. The amounts that
    it gives are bounds, of which most may not be needed."""
    for sent_s in range(6):
        model.serve(prompt(30), WHOLE_PROMPT, sent_s=sent_s)
    one = model.states("protected") // 6
    bounds = (TOKENS, WINDOWED, 0) if model.part == "swa" else (TOKENS, 0, SLOTS)
    most = sglang("mem_cache.base_prefix_cache").EvictParams(*bounds)

    def evict_until(states: int) -> None:
        reached = model.free + states
        model.cache.evict_for_alloc(
            most, allocation_reclaim_satisfied=lambda: model.free >= reached
        )
        assert model.free >= reached

    evict_until(model.states("evictable"))
    assert len(model.keeper.pins) == 6, "what was evictable was enough"
    evict_until(2 * one)
    assert len(model.keeper.pins) == 4
    model.assert_nothing_lost()


def test_states_of_pins_are_had_though_a_request_holds_all_their_tokens(model: Model) -> None:
    with model.running(prompt(150), CHUNK, 2 * CHUNK):
        one = model.states("protected") // 3  # two pins, and the request
        free = model.free + model.states("evictable")
        model.evict(states=model.states("evictable") + one)
        assert [pin.tokens for pin in model.keeper.pins] == [2 * CHUNK]
        model.evict(states=1000)
        assert (len(model.keeper.pins), model.free) == (0, free + 2 * one)
        assert model.locked == (150, one)
    model.assert_nothing_lost()


def test_requests_that_run_get_the_states_that_pins_hold(model: Model) -> None:
    prompts = [prompt(20) for _ in range(18)]
    for sent_s, ids in enumerate(prompts):
        model.serve(ids, WHOLE_PROMPT, sent_s=sent_s)
    with ExitStack() as requests:
        for _ in range(6):
            requests.enter_context(model.running(prompt(100)))
    assert 0 < (left := len(model.keeper.pins)) < 18
    assert [model.matched(ids) for ids in prompts[-left:]] == [20] * left
    model.assert_nothing_lost()


def test_a_request_that_gives_up_its_window_takes_nothing_from_a_pin(model: Model) -> None:
    ids = prompt(100)
    with model.running(ids, WHOLE_PROMPT) as req:
        model.cache.release_swa_prefix_lock(req)
        model.evict(states=model.states("evictable"))
    model.flood()
    assert model.matched(ids) == 100
    model.keeper.release(list(model.keeper.pins), "deleted")
    assert model.locked == (0, 0)
    model.assert_nothing_lost()


def test_an_engine_that_ends_stores_first_what_its_sessions_read_soonest(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, now_s = loaded("sgl_ext.engine.scheduler.radix_cache"), 0.0
    monkeypatch.setattr(module, "shared_pages_of", lambda _: SimpleNamespace(note=lambda *_: 0))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    person, tools = prompt(100), prompt(60)
    turns = (0.0, "person"), (58.0, "tools"), (59.0, "tools"), (60.0, "person")
    for now_s, session in turns:
        model.serve({"person": person, "tools": tools}[session], sent_s=now_s, session=session)
    core = module._Core(model.cache.tree_core)

    def stored() -> list[int]:
        return [core.path(node)[-1][0] for node in model.cache.worth_storing()[:2]]

    now_s = 61.0
    assert stored() == [60, 100], "the person is usually away for a minute"
    model.cache.reset()
    assert model.cache.worth_storing() == []
