"""Requests that share a cold prefix compute it once: the others wait until it is in the cache.

SGLang admits all that fit, so sub-agents that begin together compute their common prompt once
each. Here a request lets others pass for as long as one that is being computed will put into
the cache, soon, what it would compute itself:

    |---- cached ----|---- in the making, by another one ----|-- its own --|
                     at                                       end

It waits for a forward pass or a chunk at a time, never for an answer. The other one computes
the same tokens that it would, and is ahead of it already, so waiting costs no more than
computing; and as each prefill ends, and few are waited for in turn, it ends, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_ext.engine.core.counters import count_of_ranks
from sgl_ext.engine.core.shared_prefixes import common_tokens, tokens_in_common

# What is shared pays for a pass through the queue if it is at least so long.
FOLLOW_TOKENS = 512
# So many are waited for, one after the other was aborted or preempted.
_MOST_LEADERS = 3
_LEADERS = "_sgl_ext_leaders"
# Of this process's one scheduler.
_awaited = False


def anybody_waits() -> bool:
    """Whether somebody has waited for a prefix since this was last asked: it may be there now."""
    global _awaited
    awaited, _awaited = _awaited, False
    return awaited


def follows(adder: Any, req: Any) -> bool:
    """Whether a request, its cached prefix just matched, waits for one that is being computed."""
    global _awaited
    at = req.prefix_len
    wanted = req.full_untruncated_fill_ids
    if len(wanted) - at <= FOLLOW_TOKENS or not _may_follow(adder.tree_cache, req):
        return False
    probe = wanted[at : at + FOLLOW_TOKENS]
    leader = next((one for one in _computing(adder) if _leads(one, req, at, probe)), None)
    if leader is None:
        return False
    leaders = getattr(req, _LEADERS, ())
    if leader.rid not in leaders:
        if len(leaders) >= _MOST_LEADERS:
            return False
        setattr(req, _LEADERS, (*leaders, leader.rid))
        count_of_ranks("prefixes_awaited")
    _awaited = True
    return True


def _may_follow(cache: Any, req: Any) -> bool:
    """Not where SGLang has given a request a state already, nor one that reads no cache."""
    is_plain = req.session is None and req.beam_group is None and not req.return_logprob
    return is_plain and not cache.disable and not cache.supports_mamba()


def _computing(adder: Any) -> Iterator[Any]:
    """Whose prompts this pass computes, or the last one did, which may not have ended."""
    yield from adder.can_run_list
    if adder.running_batch is not None:
        yield from (one for one in adder.running_batch.reqs if not one.output_ids)


def _leads(one: Any, req: Any, at: int, probe: Any) -> bool:
    """Whether `one` will put the tokens from `at` on into the cache before long."""
    if one is req or one.skip_radix_cache_insert or one.finished():
        return False
    if one.extra_key != req.extra_key:
        return False
    most = tokens_in_common(one.cache_salt, req.cache_salt)
    if most - at < FOLLOW_TOKENS:
        return False
    theirs = one.full_untruncated_fill_ids
    if theirs[at : at + FOLLOW_TOKENS] != probe:  # of most it is enough to see this
        return False
    shared = min(common_tokens(theirs, req.full_untruncated_fill_ids), most)
    before = at - (one.extend_end or 0)  # what it has to compute first
    return shared - at >= max(FOLLOW_TOKENS, before)
