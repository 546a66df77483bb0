"""Prefill slices in the scheduler: a slice runs now, or it is rejected.

The HTTP process sends slices as requests that want no answer. They are put at the end of the
requests that arrive with them. `scheduler.prefill` decides for each one. A rejected slice is
aborted at once; the abort's reason says why, and how many of its tokens are on the device and how
many the host would load. So a slice never waits, never shares a batch, and delays a request by no
more than its own run, which is a load of any length and a slice that is computed. All ranks must
decide alike, so nothing is read here that differs between ranks.

A prompt is sent once, as its first slice. It is held until the next prompt comes. Other slices are
sent with their last token alone, and get the rest here.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

from scheduler.prefill import Rejection, least_tokens, rejection, takeable_tokens
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.hints import conversation_of, is_forced, is_slice, part_of
from sgl_ext.engine.scheduler.extension import SchedulerExtension, extension_of
from sgl_ext.engine.scheduler.state import compare, is_plain, state_of
from sgl_ext.engine.sglang_types import Req, Scheduler, TreeCache
from sgl_ext.engine.tiers.host_tier import Cached, look_up
from sgl_ext.wire.hints import rejection_message

_NONE = Cached(0, 0)


def take_slices(
    original: Callable[[Scheduler, list[Any]], None], scheduler: Scheduler, requests: list[Any]
) -> None:
    """Around `Scheduler.process_input_requests`: hands on what arrived with slices last, and
    rejects the slices that cannot run now."""
    extension = extension_of(scheduler.tree_cache)
    original(scheduler, slices_last(extension, requests))
    reject_slices(extension, scheduler)


def slices_last(extension: SchedulerExtension, requests: list[Any]) -> list[Any]:
    """What arrived in one iteration, with the slices at the end, and all their tokens in them."""
    slices = [request for request in requests if is_slice(request)]
    if not slices:
        return requests
    extension.are_slices_expected = True
    return [request for request in requests if not is_slice(request)] + [
        _whole(extension, slice_) for slice_ in slices
    ]


def _whole(extension: SchedulerExtension, slice_: Any) -> Any:
    """A slice with all its tokens; as it is if its prompt is not held."""
    prompt, end = part_of(slice_)
    if len(slice_.input_ids) == end:
        extension.prefilled_prompt = prompt, slice_.input_ids
    elif extension.prefilled_prompt is not None and extension.prefilled_prompt[0] == prompt:
        slice_ = copy(slice_)  # SGLang may send the object on to other ranks
        slice_.input_ids = extension.prefilled_prompt[1][:end]
    return slice_


def reject_slices(extension: SchedulerExtension, scheduler: Scheduler) -> None:
    """Rejects the slices in the queue that cannot run now. Runs before every iteration."""
    if not extension.are_slices_expected:
        return
    # A request that SGLang itself rejects keeps SGLang's reason.
    slices = [r for r in scheduler.waiting_queue if is_slice(r) and r.to_finish is None]
    extension.are_slices_expected = bool(slices)
    for req in slices:
        why, cached = _decide(extension, scheduler, req)
        compare("slice %s: %s %s", req.rid, why, cached)
        if why is not None:
            message = rejection_message(why, cached.on_device, cached.on_host)
            reason = {"type": "abort", "message": message}
            scheduler.abort_request(sglang_api.AbortReq(rid=req.rid, finished_reason=reason))


def _decide(
    extension: SchedulerExtension, scheduler: Scheduler, req: Req
) -> tuple[Rejection | None, Cached]:
    """Why a slice cannot run, None if it can; and how much of it is cached."""
    state = state_of(req)
    if state.is_slice_checked:  # it was allowed, and something in SGLang holds it back
        return Rejection.BUSY, _NONE
    state.is_slice_checked = True
    tree = scheduler.tree_cache
    if extension.cache is None or not is_plain(tree):
        return Rejection.UNSUPPORTED, _NONE
    if len(req.origin_input_ids) != part_of(req)[1]:
        return Rejection.UNHELD, _NONE
    if not _is_idle(scheduler, req):
        return Rejection.BUSY, _NONE
    key = sglang_api.RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
    cached = look_up(tree, key)
    on_device, on_host = cached
    new = len(req.origin_input_ids) - on_device
    page = tree.page_size
    chunk = scheduler.chunked_prefill_size
    longest = extension.settings.prefill_ahead_slice_tokens
    # The tokens that the slice continues are none that it could evict.
    ahead, worthless = extension.cache.unread_tokens()
    worthless = max(worthless - on_device, 0)
    share = extension.settings.prefill_ahead_evictable_share if conversation_of(req) else 0.0
    if share and on_host and _has_copies(tree):
        share = 1.0  # what gives way to a load can be loaded, too
    takeable = takeable_tokens(
        worthless_tokens=worthless,
        evictable_tokens=max(tree.full_evictable_size() - on_device, 0),
        ahead_tokens=ahead,
        most=int(extension.cache.pool_tokens * share),
    )
    unused = scheduler.token_to_kv_pool_allocator.available_size() + worthless
    why = rejection(
        new_tokens=max(new, least_tokens(page)) if is_forced(req) else new,
        loaded_tokens=on_host,
        page=page,
        slice_tokens=min(chunk, longest) if chunk and chunk > 0 else longest,
        free_tokens=unused + takeable - 2 * page,
    )
    if why is None:
        extension.count("prefill_ahead_taken_tokens", max(new - unused, 0))
    return why, cached


def _has_copies(tree: TreeCache) -> bool:
    """Whether what is evicted was copied to the host, if the host has room."""
    return tree.is_write_back or tree.write_through_threshold <= 1


def _is_idle(scheduler: Scheduler, req: Req) -> bool:
    """Whether nothing else runs or waits."""
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return False
    if any(other is not req for other in scheduler.waiting_queue):
        return False
    return all(one.finished() for one in scheduler.collect_inflight_reqs())
