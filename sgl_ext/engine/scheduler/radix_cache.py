"""SGLang's radix cache, extended: it pins prefixes, and knows which segments are resident.

Thin: it reports what happens in the tree to `radix.residency` and to the pins, which decide.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, NamedTuple

from radix.computed_ahead import ComputedAhead, Unread
from radix.residency import HostSegments, Residency
from radix.tiered_pins import TieredPins
from scheduler.preemption import EVICT_FIRST, EvictionPriority, eviction_priority
from scheduler.returns import LastTurns
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import conversation_of, is_guess, is_slice
from sgl_ext.engine.scheduler import state
from sgl_ext.engine.scheduler.first_token import deferred_of
from sgl_ext.engine.scheduler.pins import PinKeeper, PinPressure
from sgl_ext.engine.scheduler.state import is_plain, state_of
from sgl_ext.engine.sglang_types import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    Req,
    TreeCache,
    TreeCacheBuildContext,
    TreeCore,
)
from sgl_ext.engine.tiers.host_tier import HostCopies, Loads, count_cached
from sgl_ext.engine.tiers.leaving import Leaving
from sgl_ext.engine.tiers.shared_pages import shared_pages_of
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.hints import Hints

_MOST_EVICTED_FIRST = 4096


def make_cache(context: TreeCacheBuildContext) -> TreeCache:
    """SGLang's factory of caches: the extension's where it serves the configuration, else SGLang's
    choice."""
    args = in_effect()
    pure_swa = context.is_hybrid_swa and context.full_tokens_per_layer == 0
    if context.disable_radix_cache or args.enable_lmcache or args.enable_flexkv or pure_swa:
        return sglang_api.default_radix_cache_factory(context)
    return sglang_api.create_unified_radix_cache(context, cache_class=ExtendedRadixCache)


class Prompt(NamedTuple):
    """A prompt's tokens and their name space in the tree."""

    tokens: "array[int]"
    extra_key: str | None
    cache_salt: str | None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class _Store:
    """One request that is being stored. cached_before: how many of its tokens the tree had; None
    until it is inserted."""

    priority: EvictionPriority
    has_answer: bool
    cached_before: int | None = None


class ExtendedRadixCache(sglang_api.UnifiedRadixCache):
    """The unified radix cache.

    residency: the resident segments; None on ranks that do not publish them.
    pins: the pinned prefixes. pressure: what live requests take of them.
    loads: what loads from the host take.
    """

    def __init__(self, params: CacheInitParams) -> None:
        # `UnifiedRadixCache.__init__` ends with a call of `reset`.
        is_entry_rank = state.is_entry_rank()
        self.residency = _residency(params, None) if is_entry_rank else None
        self._store_now: _Store | None = None
        self._evicted_first: deque[tuple[Any, int]] = deque(maxlen=_MOST_EVICTED_FIRST)
        self._computed_ahead = ComputedAhead()
        self._last_turns: LastTurns[Any] = LastTurns()
        self.pool_tokens = params.token_to_kv_pool_allocator.size
        self.host_tokens = 0  # SGLang makes its host pool later
        self.loads = Loads()
        budget_tokens, _, share, shares = self._pin_limits(EngineSettings.from_environment())
        pins = TieredPins(
            budget_tokens=budget_tokens,
            owner_share=share,
            owner_shares=shares,
            page=params.page_size,
        )
        lookahead = int(params.is_eagle)
        self.pins = PinKeeper(self, pins, params.page_size, is_entry_rank, lookahead)
        self.pressure = PinPressure(self, self.pins)
        super().__init__(params)

    def init_hicache(self, server_args: Any, params: CacheInitParams) -> None:
        """Called by SGLang where there is host memory."""
        super().init_hicache(server_args, params)
        if not in_effect().enable_hierarchical_cache:
            return  # the host pool is for the requests that a decoding engine retracts
        if self.residency is not None:
            self.residency = _residency(params, HostSegments())
        if not is_plain(self):
            self.pins.cannot_spill = "model"
        elif self.host_memory_mode != "cache":
            self.pins.cannot_spill = "host memory mode"
        else:
            self.pins.memory.copies = copies = HostCopies(self)
            self.pins.memory.lease = self._lease
            self.host_tokens = copies.size
            self.limit_pins(EngineSettings.from_environment())

    def ready_to_load_host_cache(self) -> int:
        started_s = time.monotonic()
        load = super().ready_to_load_host_cache()
        if load >= 0:
            self.loads.started(time.monotonic() - started_s)
        return load

    def loading_check(self, finish_count: int | None = None) -> None:
        if self.cache_controller is None:
            return
        under_way = [*self.cache_controller.ack_load_queue]
        super().loading_check(finish_count)
        done = len(under_way) - len(self.cache_controller.ack_load_queue)
        self.loads.finished(under_way[:done])

    def limit_pins(self, settings: EngineSettings) -> None:
        """Applies the limits of changed settings, on every rank alike."""
        self.pins.change_limits(*self._pin_limits(settings))

    def _pin_limits(self, settings: EngineSettings) -> tuple[int, int, float, dict[str, float]]:
        """The budgets of device and host in tokens, the share of a tenant, and the shares of those
        with their own."""
        shares = {t.name: t.pin_share for t in settings.tenants if t.pin_share is not None}
        budget_tokens = int(self.pool_tokens * settings.pin_budget)
        host_budget_tokens = int(self.host_tokens * settings.host_pin_budget)
        return budget_tokens, host_budget_tokens, settings.pin_owner_share, shares

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        deferred = deferred_of(self)
        store = partial(self.store, req, up_to=up_to, **kwargs)
        if not (self._may_wait(req) and deferred.add(store)):
            deferred.run()  # in the order that SGLang made them
            store()

    def _may_wait(self, req: Req) -> bool:
        """Not a request that ends, nor one whose row or state other requests continue."""
        is_alone = req.session is None and req.beam_group is None and not req.finished()
        return is_alone and is_plain(self)

    def store(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Stores a request's first `up_to` tokens in the tree, and records what that changed."""
        hints = state_of(req).hints
        inserted_before = req.kv.cache_inserted_len
        has_answer = req.finished() and up_to > len(req.origin_input_ids)
        now = self._store_now = _Store(_eviction_priority(req, hints), has_answer)
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
        finally:
            self._store_now = None
        if self.residency is not None and req.finished() and not is_slice(req):
            count_cached(req)
        if now.cached_before is None:
            return
        self._note_evicted_first(req, up_to, now.priority, now.cached_before)
        if hints is not None and hints.conversation and not is_slice(req):
            loaded = self._computed_ahead.read(hints.conversation)
            used = min(loaded, req.cached_tokens) - req.host_loaded_length
            if used > 0 and self.residency is not None:
                counter("loaded_ahead_tokens_used").inc(used)
        if hints is None:
            return
        if self.residency is not None:
            self.residency.add(
                hints.hashes,
                hints.ends,
                key=Prompt(req.origin_input_ids, req.extra_key, req.cache_salt),
                resident=req.kv.cache_protected_len,
                node=req.last_node,
                had=now.cached_before,
                own=inserted_before,
            )
            tier = shared_pages_of(self)
            if tier is not None and now.cached_before < req.kv.cache_inserted_len:
                tier.note(self.residency.chain(hints.hashes), self.tree_core, req.last_node)
            if req.finished() and hints.conversation and not is_slice(req):
                self._note_turn(hints, req.last_node)
        self.pins.prompt_stored(req, hints, req.kv.cache_protected_len)
        if hints.is_last and req.finished():
            self.pins.end_session(hints)

    def _note_turn(self, hints: Hints, node: Any) -> None:
        if hints.is_last:
            self._last_turns.forget(hints.conversation)
        else:
            self._last_turns.ended(hints.conversation, node, hints.sent_s, time.monotonic())

    def _note_evicted_first(
        self, req: Req, up_to: int, priority: EvictionPriority, cached_before: int
    ) -> None:
        """Notes the tokens just stored that no request will read, or none has read yet, and the
        node that they end at."""
        prompt = len(req.origin_input_ids)
        if is_slice(req):
            tokens, conversation = req.kv.cache_inserted_len - cached_before, conversation_of(req)
            if conversation:
                self._computed_ahead.load(conversation, req.host_loaded_length)
            if tokens > 0 and conversation:
                worthless = is_guess(req)
                self._computed_ahead.add(
                    conversation, req.last_node, tokens, is_worthless=worthless
                )
            return
        is_prompt = priority.prompt == EVICT_FIRST
        if priority.answer != EVICT_FIRST or not (is_prompt or up_to > prompt):
            return
        begin = cached_before if is_prompt else max(cached_before, prompt)
        if (tokens := req.kv.cache_inserted_len - begin) > 0:
            self._evicted_first.append((req.last_node, tokens))

    def unread_tokens(self) -> Unread:
        """About how many tokens were computed ahead and are unread; and how many evictable tokens
        are evicted first: those that no request will read, and unread guesses."""
        core = _Core(self.tree_core)
        resident = [(node, n) for node, n in self._evicted_first if not core.evicted(node)]
        self._evicted_first = deque(resident, maxlen=_MOST_EVICTED_FIRST)
        ahead, guessed = self._computed_ahead.unread(core.evicted)
        worthless = guessed + sum(tokens for _, tokens in resident)
        return Unread(ahead, min(worthless, self.full_evictable_size()))

    def worth_storing(self) -> list[Any]:
        """The nodes at the ends of prefixes that will be read again: of pins, of sessions that are
        expected back soonest, and then of what was used last."""
        if shared_pages_of(self) is None:
            return []
        pinned = [pin.label.node for pin in self.pins.pins]
        expected = self._last_turns.soonest_first(time.monotonic())
        others = self.residency.leaves() if self.residency is not None else ()
        return [*pinned, *expected, *others]

    def leave(self, nodes: Iterable[Any]) -> Leaving:
        """Stores the prefixes that end there, as the engine ends."""
        if (tier := shared_pages_of(self)) is not None:
            tier.switch.is_patient = True
        return Leaving(self, nodes)

    def _lease(self, node: Any, ttl_s: float) -> None:
        if (tier := shared_pages_of(self)) is not None:
            tier.keep(self.tree_core, node, ttl_s)

    def is_evicted(self, node: Any) -> bool:
        """Whether a node is no longer in device memory."""
        return _Core(self.tree_core).evicted(node)

    def match_until(self, req: Req, tokens: int) -> tuple[int, Any]:
        """How many of a prompt's first `tokens` a request could use, and the node they end at.

        Splits the node if they end inside one. With a draft model, one more token must follow.
        """
        key = sglang_api.RadixKey(
            req.origin_input_ids[: tokens + self.tree_core.is_eagle],
            req.extra_key,
            is_bigram=self.tree_core.is_eagle,
            cache_salt=req.cache_salt,
        )
        aligned = key.page_aligned(self.page_size)
        found = self.match_prefix(sglang_api.MatchPrefixParams(key=aligned))
        return found.device_prefix_len, found.last_device_node

    def insert(self, params: InsertParams) -> InsertResult:
        now = self._store_now
        if now is None:
            params.priority = EvictionPriority().prompt
            return super().insert(params)
        # A store's second insert only splits off the prompt.
        is_first = now.cached_before is None
        is_answer = is_first and now.has_answer
        params.priority = now.priority.answer if is_answer else now.priority.prompt
        result = super().insert(params)
        if is_first:
            now.cached_before = result.prefix_len
        return result

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict_with_pins(super().evict, params)

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """With --enable-unified-memory, SGLang wants no amounts but memory for an allocation: the
        amounts are the most that may be evicted for it."""
        is_satisfied = kwargs.get("allocation_reclaim_satisfied") or (lambda: False)
        evict = partial(super().evict_for_alloc, **kwargs)
        return self._evict_with_pins(evict, params, is_satisfied)

    def _evict_with_pins(
        self,
        evict: Callable[[EvictParams], EvictResult],
        params: EvictParams,
        is_satisfied: Callable[[], bool] = lambda: False,
    ) -> EvictResult:
        """Evicts what is wanted, and gives up pins if that is not enough.

        It is enough once `is_satisfied`, or once each amount is counted as evicted or is free:
        evicted memory may become free later, and memory may become free without being evicted.
        """
        wanted = (params.num_tokens, params.swa_num_tokens, params.mamba_num)
        goals = list(map(add, self._free(wanted), wanted))
        total = evict(params)

        def missing() -> list[int]:
            evicted = (
                total.num_tokens_evicted,
                total.swa_num_tokens_evicted,
                total.mamba_num_evicted,
            )
            rows = zip(wanted, evicted, goals, self._free(wanted), strict=True)
            return [max(0, min(amount - had, goal - free)) for amount, had, goal, free in rows]

        def is_enough() -> bool:
            if is_satisfied():
                return True
            if any(amounts := missing()):
                more = evict(sglang_api.EvictParams(*amounts))
                total.num_tokens_evicted += more.num_tokens_evicted
                total.swa_num_tokens_evicted += more.swa_num_tokens_evicted
                total.mamba_num_evicted += more.mamba_num_evicted
            return is_satisfied() or not any(missing())

        if self.pins.tokens:
            self.pressure.make_room(is_enough)
        if self.residency is not None and total.num_tokens_evicted > 0:
            self.residency.evicted()
        return total

    def evict_host(self, num_tokens: int, *component_type: Any) -> int:
        """SGLang evicts on the host here alone, except with its device copies in `evict`."""
        if self.residency is not None and self.residency.host is not None:
            self.residency.host.evicted()
        return super().evict_host(num_tokens, *component_type)

    def _free(self, wanted: tuple[int, int, int]) -> list[int]:
        """How much is free of each kind of memory that is wanted; 0 of the others."""
        types = sglang_api.ComponentType
        kinds = zip((types.FULL, types.SWA, types.MAMBA), wanted, strict=True)
        return [self._component_available_size(kind) if amount > 0 else 0 for kind, amount in kinds]

    def reset(self) -> None:
        super().reset()
        self._evicted_first.clear()
        self._computed_ahead.clear()
        self._last_turns.clear()
        self.pins.forget_all()
        if self.residency is not None:
            self.residency.clear()

    def sweep(self, steps: int) -> None:
        """Finds segments that were evicted, in at most so many steps (see `Residency.sweep`)."""
        if self.residency is not None and not self.residency.settled:
            self.residency.sweep(_Core(self.tree_core), steps)


def _residency(params: CacheInitParams, host: HostSegments | None) -> Residency:
    slack = params.page_size - 1 + bool(params.is_eagle)
    return Residency(page=params.page_size, slack=slack, host=host)


class _Core:
    """The tree core as `radix.residency.Tree`; no method changes it."""

    def __init__(self, core: TreeCore) -> None:
        self._core = core

    def evicted(self, node: int) -> bool:
        try:
            return self._core.is_full_device_evicted(node)
        except KeyError:  # an id is never used for two nodes
            return True

    def match(self, key: Prompt, tokens: int) -> tuple[int, int]:
        prompt = sglang_api.RadixKey(key.tokens[:tokens], key.extra_key, cache_salt=key.cache_salt)
        matched, node, _ = self._core.match_full_device_prefix(prompt)
        return matched, node

    def keeps(self, node: int) -> bool:
        try:
            return not self._core.is_full_device_evicted(node) or self._core.is_backuped(node)
        except KeyError:
            return False

    def path(self, node: int) -> list[tuple[int, int]]:
        (found,) = self._core.collect_path_info([node])
        return [(each.path_end, each.node_id) for each in found]


def _eviction_priority(req: Req, hints: Hints | None) -> EvictionPriority:
    if is_guess(req):
        return EvictionPriority(EVICT_FIRST, EVICT_FIRST)
    if hints is None:
        return EvictionPriority()
    return eviction_priority(
        is_kept=hints.is_reusable, is_last=hints.is_last, is_answer_kept=hints.is_answer_reusable
    )
