"""How much of a prompt is cached, and in which tier."""

from typing import NamedTuple

from radix.tier import Tier
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.sglang_types import RadixKey, Req, TreeCache


class Cached(NamedTuple):
    """How many tokens of a prompt are on the device, from its first one on, and how many of those
    that follow the host would load."""

    on_device: int
    on_host: int


def look_up(cache: TreeCache, key: RadixKey) -> Cached:
    """How much of a key is cached.

    Without host copies it changes nothing. With them it is a match of SGLang's, which counts as a
    read of the prefix and may split a node: nothing else shows what is on the host.
    """
    if cache.cache_controller is None:
        matched, *_ = cache.tree_core.match_full_device_prefix(key)
        return Cached(matched, 0)
    found = cache.match_prefix(sglang_api.MatchPrefixParams(key=key))
    # SGLang computes fewer tokens than its threshold instead of loading them.
    is_loaded = found.host_hit_length >= cache.load_back_threshold
    return Cached(found.device_prefix_len, found.host_hit_length if is_loaded else 0)


def count_cached(req: Req) -> None:
    """Counts the tokens of a request that were cached, by tier."""
    tokens = req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage
    for tier, amount in zip(Tier, tokens, strict=True):
        if amount:
            counter("cached_tokens").labels(tier.value).inc(amount)
