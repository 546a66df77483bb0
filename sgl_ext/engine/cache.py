"""SGLang's radix cache that also notes which segments it holds. Scheduler processes only.

Thin: it hears what the cache does and tells `radix.held.Held`, which decides. The
cache itself behaves as SGLang's does.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    default_radix_cache_factory,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory, get_parallel

from radix.held import Held
from sgl_ext.engine.chain import carried

_NOTHING = -1


def make_cache(context: Any) -> Any:
    """SGLang's factory of caches: ours where it serves the configuration, else SGLang's choice."""
    memory = get_memory()
    pure_swa = context.is_hybrid_swa and context.full_tokens_per_layer == 0
    if context.disable_radix_cache or memory.enable_lmcache or memory.enable_flexkv or pure_swa:
        return default_radix_cache_factory(context)
    return create_unified_radix_cache(context, cache_class=HeldCache)


def is_publisher() -> bool:
    """Whether this scheduler tells for its engine: the first rank, of an engine that has one tree.

    Replicas and data-parallel attention have a tree each behind one address.
    """
    parallel = get_parallel()
    return bool(parallel.num_dp_ranks == 1 and parallel.tp_rank == 0 and parallel.pp_rank == 0)


class Prompt(NamedTuple):
    """A prompt's tokens in their name space of the tree."""

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None

    def __len__(self) -> int:
        return len(self.tokens)


class HeldCache(UnifiedRadixCache):  # type: ignore[misc]  # sglang is untyped
    """The unified radix cache; `held` is what it holds in segments, None where nobody asks."""

    def __init__(self, params: Any) -> None:
        # `UnifiedRadixCache.__init__` ends in `reset`.
        slack = params.page_size - 1 + bool(params.is_eagle)
        self.held = Held(page=params.page_size, slack=slack) if is_publisher() else None
        self._had = _NOTHING  # tokens that the tree had before a checkpoint's insert
        super().__init__(params)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        chain = carried(req) if self.held is not None else None
        if self.held is None or chain is None:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        own = req.kv.cache_inserted_len
        self._had = _NOTHING
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self._had == _NOTHING:  # was inserted
            return
        self.held.add(
            chain.hashes,
            chain.ends,
            key=Prompt(req.origin_input_ids, req.extra_key, req.cache_salt),
            resident=req.kv.cache_protected_len,
            node=req.last_node,
            had=self._had,
            own=own,
        )

    def insert(self, params: Any) -> Any:
        result = super().insert(params)
        if self._had == _NOTHING:  # a second insert of a checkpoint only splits a node
            self._had = result.prefix_len
        return result

    def evict(self, params: Any) -> Any:
        return self._noted(super().evict(params))

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        return self._noted(super().evict_for_alloc(params, **kwargs))

    def _noted(self, result: Any) -> Any:
        if self.held is not None and result.num_tokens_evicted > 0:
            self.held.evicted()
        return result

    def reset(self) -> None:
        super().reset()
        if self.held is not None:
            self.held.clear()

    def sweep(self, steps: int) -> None:
        """Looks for what was evicted, for so many steps (see `Held.sweep`)."""
        if self.held is not None and not self.held.settled:
            self.held.sweep(_Core(self.tree_core), steps)


class _Core:
    """The tree core as `radix.held.Tree`; both questions leave it as it is."""

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
