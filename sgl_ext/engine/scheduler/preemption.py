"""Whose slot or memory a more important request takes, and which prefill stands back for it.

`scheduler.preemption` decides; here is what it is told, and done. SGLang preempts for a slot
only; ours does for memory as well, and chooses so that the least is lost. A victim is released
as SGLang does it, but what it has computed stays in the tree, to be evicted like anything
else: as long as it is not, the victim goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.preemption import PreemptionHistory, Running, victims
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import count_of_ranks
from sgl_ext.engine.core.settings import settings as _settings
from sgl_ext.engine.scheduler.clock import keeper_of
from sgl_ext.engine.scheduler.priority import admitted, applies, first_waiting

_TIMES = "_sgl_ext_times_preempted"
_COMPUTED = "_sgl_ext_computed_tokens"
# Of this process's one scheduler.
_feuds = PreemptionHistory()


def preempt_for_slot(original: Callable[..., bool], adder: Any, req: Any) -> bool:
    """Around `PrefillAdder.preempt_to_schedule`, which SGLang asks when all slots are taken."""
    if keeper_of(adder) is None or not applies(req):
        return original(adder, req)
    return preempt(adder, req, slots=1)


def preempt(adder: Any, req: Any, slots: int = 0) -> bool:
    """Whether requests that run were preempted, so that `req` has the memory that it misses, and
    so many slots."""
    keeper = keeper_of(adder)
    if keeper is None or not applies(req) or adder.running_batch is None:
        return False
    batch = adder.running_batch
    now_s, settings = keeper.now_s, _settings()
    highest = req.priority - settings.preemption_threshold
    candidates = [
        (at, one)
        for at, one in enumerate(batch.reqs)
        if (reached := admitted(one)) is not None
        and reached.step <= highest
        and not one.finished()
        and one not in adder.preempt_list
        and one.beam_group is None
        and _feuds.allows(req.rid, one.rid)
    ]
    chosen = victims(
        [_running(adder, one) for _, one in candidates],
        max(_missing_tokens(adder, req), 0),
        req.priority,  # waiting gives nobody a right to what another one has
        now_s,
        slots=slots,
        threshold=settings.preemption_threshold,
        grace_s=settings.preemption_grace_s,
    )
    if not chosen:
        return False
    for at in chosen:
        _feuds.record(req.rid, candidates[at][1].rid)
    _take(adder, [candidates[at][0] for at in chosen])
    return True


def _missing_tokens(adder: Any, req: Any) -> int:
    """How much more memory a request needs: its prompt's rest and its answer, as SGLang counts."""
    answer = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    prompt = len(req.full_untruncated_fill_ids) - req.prefix_len
    wanted = prompt + min(answer, sglang_api.CLIP_MAX_NEW_TOKENS) + adder.per_req_token_overhead
    return int(wanted - adder.rem_total_tokens) + 1


def _take(adder: Any, places: list[int]) -> None:
    """As SGLang does it for a slot: they are released now, and queued again by the scheduler."""
    batch = adder.running_batch
    gone = set(places)
    for count, at in enumerate(sorted(gone), start=1):
        one = batch.reqs[at]
        count_of_ranks("preempted")
        count_of_ranks("preempted_tokens", len(one.output_ids))
        setattr(one, _TIMES, getattr(one, _TIMES, 0) + 1)
        adder.memory_budget.total_offset -= adder._get_running_request_total_token_offset(one)
        adder.preempt_list.append(one)
        _keep(adder.tree_cache, one)
        batch.release_req(at, len(batch.reqs) - count)
    batch.filter_batch(keep_indices=[at for at in range(len(batch.reqs)) if at not in gone])


def _keep(cache: Any, req: Any) -> None:
    """Puts into the tree what a request has computed, but for what may still be in the making."""
    setattr(req, _COMPUTED, req.kv.kv_committed_len)
    if req.skip_radix_cache_insert or req.input_embeds is not None or not _is_plain(cache):
        return
    req.refresh_fill_ids()
    cache.checkpoint(req, up_to=min(req.owned_kv_len(), len(req.full_untruncated_fill_ids)))


def _is_plain(cache: Any) -> bool:
    """Whether a token's cache is its own: with a window or a state, a part is of no use alone."""
    return not (cache.supports_swa() or cache.supports_mamba())


def resumed(req: Any) -> None:
    """A request is admitted: what it had computed before it was preempted, and is not cached any
    more, is computed again."""
    had = getattr(req, _COMPUTED, 0)
    if had > req.prefix_len:
        count_of_ranks("recomputed_tokens", had - req.prefix_len)
    setattr(req, _COMPUTED, 0)


def stands_back(adder: Any, req: Any) -> bool:
    """Whether a prefill in chunks was put back into the queue, before its next one, as a much more
    important request waits. What it has computed is cached, so it loses nothing but its turn."""
    first, reached = first_waiting(), admitted(req)
    if first is None or reached is None or keeper_of(adder) is None or not applies(req):
        return False
    if reached.step > first.priority - _settings().preemption_threshold:
        return False
    if not (_may_stand_back(req) and _is_plain(adder.tree_cache)):
        return False
    count_of_ranks("prefills_interrupted")
    setattr(req, _COMPUTED, req.prefix_len)
    cache = adder.tree_cache
    sglang_api.release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=cache.req_to_token_pool,
        token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
        tree_cache=cache,
        hisparse_coordinator=None,
    )
    adder.preempt_list.append(req)
    return True


def _may_stand_back(req: Any) -> bool:
    """Not a request of several parts, nor one that SGLang keeps books of chunk by chunk."""
    is_alone = req.session is None and req.beam_group is None and not req.skip_radix_cache_insert
    return bool(is_alone and not req.return_logprob and sglang_api.get_parallel().pp_size == 1)


def _running(adder: Any, req: Any) -> Running:
    reached = admitted(req)
    assert reached is not None, "only those are asked about"
    return Running(
        priority=reached.step,
        frees_tokens=_freed(adder, req),
        lost_tokens=len(req.output_ids),
        admitted_s=reached.at_s,
        times_preempted=getattr(req, _TIMES, 0),
    )


def _freed(adder: Any, req: Any) -> int:
    """What comes free without a request: what it alone has, and what is set aside for it."""
    cache, kv = adder.tree_cache, req.kv
    own = kv.kv_allocated_len - kv.cache_protected_len
    if _is_plain(cache):
        before = cache.full_evictable_size()
        cache.unlock(req.lock)
        own += cache.full_evictable_size() - before
        req.lock = cache.lock(req.last_node)
    return int(own + adder._get_running_request_total_token_offset(req))
