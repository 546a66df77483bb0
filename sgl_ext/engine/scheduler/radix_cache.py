"""SGLang's radix cache that notes which segments it holds and pins prefixes. Schedulers only.

Thin: it hears what the cache does and tells `radix.residency.Held` and the pins, which decide.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from radix.pins import Pins
from radix.residency import Residency
from scheduler.eviction_priority import EVICT_FIRST, EvictionPriority, eviction_priority
from sgl_ext.engine.core import ranks
from sgl_ext.engine.core.hints import Hints, hints_of
from sgl_ext.engine.core.slices import is_guess
from sgl_ext.engine.scheduler import first_token
from sgl_ext.engine.scheduler.pin_keeper import PinKeeper
from sgl_ext.engine.sglang_api import (
    ComponentType,
    EvictParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
    create_unified_radix_cache,
    default_radix_cache_factory,
    get_memory,
)
from sgl_ext.settings.schema import EngineSettings

_NOTHING = -1
_MOST_WORTHLESS = 4096


def make_cache(context: Any) -> Any:
    """SGLang's factory of caches: ours where it serves the configuration, else SGLang's choice."""
    memory = get_memory()
    pure_swa = context.is_hybrid_swa and context.full_tokens_per_layer == 0
    if context.disable_radix_cache or memory.enable_lmcache or memory.enable_flexkv or pure_swa:
        return default_radix_cache_factory(context)
    return create_unified_radix_cache(context, cache_class=HeldCache)


class Prompt(NamedTuple):
    """A prompt's tokens in their name space of the tree."""

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None

    def __len__(self) -> int:
        return len(self.tokens)


class HeldCache(UnifiedRadixCache):
    """The unified radix cache.

    held: what it holds in segments, None where nobody asks.
    pins: what it keeps locked.
    """

    def __init__(self, params: Any) -> None:
        # `UnifiedRadixCache.__init__` ends in `reset`.
        tells = ranks.is_entry_rank()
        slack = params.page_size - 1 + bool(params.is_eagle)
        self.held = Residency(page=params.page_size, slack=slack) if tells else None
        self._had = _NOTHING  # tokens that the tree had before a checkpoint's insert
        self._has_answer = False  # whether a checkpoint's insert goes beyond the prompt
        self._worth = EvictionPriority()
        self._worthless: deque[tuple[Any, int]] = deque(maxlen=_MOST_WORTHLESS)
        settings = EngineSettings.from_environment()
        budget = int(params.token_to_kv_pool_allocator.size * settings.pin_budget)
        shares = {t.name: t.pin_share for t in settings.tenants if t.pin_share is not None}
        pins = Pins(
            budget_tokens=budget,
            owner_share=settings.pin_owner_share,
            owner_shares=shares,
            page=params.page_size,
        )
        self.pins = PinKeeper(self, pins, params.page_size, tells)
        super().__init__(params)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        checkpoint = partial(self._checkpoint, req, up_to=up_to, **kwargs)
        if not (self._may_wait(req) and first_token.waits(checkpoint)):
            first_token.settle()  # in the order that SGLang made them
            checkpoint()

    def _may_wait(self, req: Any) -> bool:
        """Not one that ends, nor one whose row or state others go on with."""
        is_alone = req.session is None and req.beam_group is None and not req.finished()
        return is_alone and not (self.supports_swa() or self.supports_mamba())

    def _checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        hints = hints_of(req)
        self._worth = _worth(req, hints)
        own = req.kv.cache_inserted_len
        self._had = _NOTHING
        self._has_answer = req.finished() and up_to > len(req.origin_input_ids)
        super().checkpoint(req, up_to=up_to, **kwargs)
        self._note_worthless(req, up_to)
        self._worth = EvictionPriority()
        if hints is None or self._had == _NOTHING:  # was inserted
            return
        if self.held is not None:
            self.held.add(
                hints.hashes,
                hints.ends,
                key=Prompt(req.origin_input_ids, req.extra_key, req.cache_salt),
                resident=req.kv.cache_protected_len,
                node=req.last_node,
                had=self._had,
                own=own,
            )
        self.pins.seen(req, hints, req.kv.cache_protected_len)
        if hints.is_last and req.finished():
            self.pins.ended(hints)

    def _note_worthless(self, req: Any, up_to: int) -> None:
        """Notes what a request has just stored that nobody will miss, and where it ends."""
        prompt = len(req.origin_input_ids)
        stored = self._worth.prompt == EVICT_FIRST or up_to > prompt
        if self._had == _NOTHING or not stored or self._worth.answer != EVICT_FIRST:
            return
        begin = self._had if self._worth.prompt == EVICT_FIRST else max(self._had, prompt)
        if (tokens := req.kv.cache_inserted_len - begin) > 0:
            self._worthless.append((req.last_node, tokens))

    def worthless_tokens(self) -> int:
        """About how many tokens it holds that nobody will ask for again, and evicts first."""
        core = _Core(self.tree_core)
        kept = [(node, tokens) for node, tokens in self._worthless if not core.evicted(node)]
        self._worthless = deque(kept, maxlen=_MOST_WORTHLESS)
        return min(sum(tokens for _, tokens in kept), int(self.full_evictable_size()))

    def match_until(self, req: Any, tokens: int) -> tuple[int, int]:
        """How much of a prompt's first `tokens` is of use to a request, and the node it ends at.

        Splits the node if it ends within one.
        """
        key = RadixKey(
            req.origin_input_ids[:tokens],
            req.extra_key,
            is_bigram=self.tree_core.is_eagle,
            cache_salt=req.cache_salt,
        )
        found = self.match_prefix(MatchPrefixParams(key=key.page_aligned(self.page_size)))
        return found.device_prefix_len, found.last_device_node

    def insert(self, params: Any) -> Any:
        # A second insert of a checkpoint only splits off the prompt.
        is_first = self._had == _NOTHING
        is_answer = is_first and self._has_answer
        params.priority = self._worth.answer if is_answer else self._worth.prompt
        result = super().insert(params)
        if is_first:
            self._had = result.prefix_len
        return result

    def evict(self, params: Any) -> Any:
        return self._evicted(super().evict, params)

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        return self._evicted(partial(super().evict_for_alloc, **kwargs), params)

    def _evicted(self, evict: Callable[[Any], Any], params: Any) -> Any:
        """Evicts as asked; what is short then, pins make room for."""
        wanted = self._wanted(params)
        total = evict(params)

        def short() -> Any:
            return _short(params, total, [has() - need for has, need in wanted])

        def is_enough() -> bool:
            if (owed := short()) is not None:
                _add(total, evict(owed))
            return short() is None

        if len(self.pins.pins):
            self.pins.make_room(is_enough)
        if self.held is not None and total.num_tokens_evicted > 0:
            self.held.evicted()
        return total

    def _wanted(self, params: Any) -> list[tuple[Callable[[], int], int]]:
        """Of each kind of memory, how to learn what is free, and what is to be free in the end."""
        parts = (
            ComponentType.FULL,
            ComponentType.SWA,
            ComponentType.MAMBA,
        )
        wanted: list[tuple[Callable[[], int], int]] = []
        for part, asked in zip(parts, _amounts(params), strict=True):
            free = partial(self._component_available_size, part) if asked > 0 else _none
            wanted.append((free, free() + asked))
        return wanted

    def reset(self) -> None:
        super().reset()
        self._worthless.clear()
        self.pins.forget_all()
        if self.held is not None:
            self.held.clear()

    def sweep(self, steps: int) -> None:
        """Looks for what was evicted, for so many steps (see `Held.sweep`)."""
        if self.held is not None and not self.held.settled:
            self.held.sweep(_Core(self.tree_core), steps)


class _Core:
    """The tree core as `radix.residency.Tree`; both questions leave it as it is."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def evicted(self, node: int) -> bool:
        try:
            return bool(self._core.is_full_device_evicted(node))
        except KeyError:  # ids are never given twice
            return True

    def match(self, key: Prompt, tokens: int) -> tuple[int, int]:
        prompt = RadixKey(key.tokens[:tokens], key.extra_key, cache_salt=key.cache_salt)
        matched, node, _ = self._core.match_full_device_prefix(prompt)
        return matched, node


def _worth(req: Any, hints: Hints | None) -> EvictionPriority:
    if is_guess(req):
        return EvictionPriority(EVICT_FIRST, EVICT_FIRST)
    if hints is None:
        return EvictionPriority()
    return eviction_priority(
        is_kept=hints.is_reusable, is_last=hints.is_last, is_answer_kept=hints.is_answer_reusable
    )


def _none() -> int:
    return 0


def _amounts(params: Any) -> tuple[int, int, int]:
    return params.num_tokens, params.swa_num_tokens, params.mamba_num


def _short(asked: Any, done: Any, ahead: list[int]) -> Any:
    """What an eviction still owes, None if nothing.

    It owes what was neither counted as evicted nor is free now: what is evicted may become
    free later, and what becomes free need not have been asked for. `ahead`: how much more
    is free than was wanted.
    """
    evicted = (done.num_tokens_evicted, done.swa_num_tokens_evicted, done.mamba_num_evicted)
    owed = [
        max(0, min(wanted - had, -over))
        for wanted, had, over in zip(_amounts(asked), evicted, ahead, strict=True)
    ]
    return EvictParams(*owed) if any(owed) else None


def _add(total: Any, more: Any) -> None:
    total.num_tokens_evicted += more.num_tokens_evicted
    total.swa_num_tokens_evicted += more.swa_num_tokens_evicted
    total.mamba_num_evicted += more.mamba_num_evicted
