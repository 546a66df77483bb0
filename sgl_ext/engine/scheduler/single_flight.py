"""Requests that share an uncached prefix compute it once: the others wait until it is cached.

SGLang admits every request that fits, so sub-agents that start together would each compute their
common prompt. Here a request lets others pass while another one, its leader, computes tokens that
the request would compute itself, and will cache them soon:

    |---- cached ----|---- computed by the leader ----|---- its own ----|
                     start                            end

A request waits for one forward pass or one chunk at a time, never for an answer. The leader
computes the same tokens and is ahead already, so waiting costs no more than computing. Prefills
end and a request has few leaders, so waiting ends, too.
"""

from array import array
from collections.abc import Iterator

from sgl_ext.engine.core.shared_prefixes import common_tokens, tokens_in_common
from sgl_ext.engine.scheduler.state import SchedulerExtension, state_of
from sgl_ext.engine.sglang_types import PrefillAdder, Req, TreeCache

# A shorter prefix does not pay for another pass through the queue.
FOLLOW_TOKENS = 512
# A request gets another leader when one was aborted or preempted.
_MOST_LEADERS = 3


def must_wait(extension: SchedulerExtension, adder: PrefillAdder, req: Req) -> bool:
    """Whether a request, its cached prefix just matched, waits for one that is being computed."""
    start = req.prefix_len + req.host_hit_length  # what the host has is loaded, not computed
    wanted = req.full_untruncated_fill_ids
    if len(wanted) - start <= FOLLOW_TOKENS or not _may_wait(adder.tree_cache, req):
        return False
    probe = wanted[start : start + FOLLOW_TOKENS]
    leader = next((one for one in _computing(adder) if leads(one, req, start, probe)), None)
    if leader is None:
        return False
    state = state_of(req)
    if leader.rid not in state.leaders:
        if len(state.leaders) >= _MOST_LEADERS:
            return False
        state.leaders += (leader.rid,)
        extension.count("prefixes_awaited")
    extension.is_prefix_awaited = True
    return True


def _may_wait(cache: TreeCache, req: Req) -> bool:
    """Not a request that SGLang has given a state already, nor one that reads no cache."""
    is_plain = req.session is None and req.beam_group is None and not req.return_logprob
    return is_plain and not cache.disable and not cache.supports_mamba()


def _computing(adder: PrefillAdder) -> Iterator[Req]:
    """The requests whose prompts this pass computes, or the last pass, which may still run."""
    yield from adder.can_run_list
    if adder.running_batch is not None:
        yield from (one for one in adder.running_batch.reqs if not one.output_ids)


def leads(leader: Req, req: Req, start: int, probe: "array[int]") -> bool:
    """Whether `leader` will soon cache the tokens of `req` from `start` on.

    probe: the first FOLLOW_TOKENS of them.
    """
    if leader is req or leader.skip_radix_cache_insert or leader.finished():
        return False
    if leader.extra_key != req.extra_key:
        return False
    computed_first = start - (leader.extend_end or 0)
    least = start + max(FOLLOW_TOKENS, computed_first)
    if tokens_in_common(leader.cache_salt, req.cache_salt) < least:
        return False
    theirs = leader.full_untruncated_fill_ids
    if theirs[start : start + FOLLOW_TOKENS] != probe:  # most differ here already
        return False
    return common_tokens(theirs, req.full_untruncated_fill_ids, least) == least
