"""Prefill slices in the scheduler: a slice runs now, or it is rejected.

The HTTP process sends slices as requests that want no answer. They are put at the end of the
requests that arrive with them. `scheduler.prefill` decides for each one. A rejected slice is
aborted at once; the abort's reason says why, and how many of its tokens are cached. So a slice
never waits, never shares a batch, and delays a request by no more than its own run. All ranks must
decide alike, so nothing is read here that differs between ranks.
"""

from __future__ import annotations

from typing import Any

from scheduler.prefill import Rejection, least_tokens, rejection
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.slices import is_forced, is_slice
from sgl_ext.engine.scheduler.extension import ExtendedCache, SchedulerExtension
from sgl_ext.engine.scheduler.request_state import state_of
from sgl_ext.engine.sglang_scheduler_types import Scheduler
from sgl_ext.engine.sglang_types import Req, TreeCache


def slices_last(extension: SchedulerExtension, requests: list[Any]) -> list[Any]:
    """What arrived in one iteration, with the slices at the end."""
    slices = [request for request in requests if is_slice(request)]
    if not slices:
        return requests
    extension.are_slices_expected = True
    return [request for request in requests if not is_slice(request)] + slices


def reject_slices(extension: SchedulerExtension, scheduler: Scheduler) -> None:
    """Rejects the slices in the queue that cannot run now. Runs before every iteration."""
    if not extension.are_slices_expected:
        return
    # A request that SGLang itself rejects keeps SGLang's reason.
    slices = [r for r in scheduler.waiting_queue if is_slice(r) and r.to_finish is None]
    extension.are_slices_expected = bool(slices)
    for req in slices:
        why, cached = _decide(extension, scheduler, req)
        if why is not None:
            reason = {"type": "abort", "message": f"{why} {cached}"}
            scheduler.abort_request(sglang_api.AbortReq(rid=req.rid, finished_reason=reason))


def _decide(
    extension: SchedulerExtension, scheduler: Scheduler, req: Req
) -> tuple[Rejection | None, int]:
    """Why a slice cannot run, None if it can; and how many of its tokens are cached."""
    state = state_of(req)
    if state.is_slice_checked:  # it was allowed, and something in SGLang holds it back
        return Rejection.BUSY, 0
    state.is_slice_checked = True
    tree = scheduler.tree_cache
    if extension.cache is None or not can_prefill_ahead(tree):
        return Rejection.MEMORY, 0
    cached = _cached_tokens(tree, req)
    new = len(req.origin_input_ids) - cached
    page = tree.page_size
    chunk = scheduler.chunked_prefill_size
    longest = extension.settings.prefill_ahead_slice_tokens
    why = rejection(
        is_idle=_is_idle(scheduler, req),
        new_tokens=max(new, least_tokens(page)) if is_forced(req) else new,
        page=page,
        slice_tokens=min(chunk, longest) if chunk and chunk > 0 else longest,
        free_tokens=_free_tokens(extension.cache, scheduler, cached) - 2 * page,
    )
    return why, cached


def can_prefill_ahead(tree: TreeCache) -> bool:
    """Whether a cache has one kind of memory only."""
    return not (tree.supports_swa() or tree.supports_mamba())


def _is_idle(scheduler: Scheduler, req: Req) -> bool:
    """Whether nothing else runs or waits."""
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return False
    if any(other is not req for other in scheduler.waiting_queue):
        return False
    return all(one.finished() for one in scheduler.collect_inflight_reqs())


def _cached_tokens(tree: TreeCache, req: Req) -> int:
    key = sglang_api.RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
    return tree.tree_core.match_full_device_prefix(key)[0]


def _free_tokens(cache: ExtendedCache, scheduler: Scheduler, cached: int) -> int:
    """The memory that a slice may use: what is free, and what no request will read again, except
    the tokens that the slice itself continues."""
    available = scheduler.token_to_kv_pool_allocator.available_size()
    return available + max(cache.evict_first_tokens() - cached, 0)
