"""In the scheduler: a slice that is prefilled ahead runs now, or not at all.

Slices come from the HTTP process as requests that ask for no answer. When they arrive, behind
all others that came with them, `scheduler.prefill` decides of each; what may not run is refused
at once, as an aborted request whose reason says why and how much of it is cached. So no slice
ever waits, shares a batch with anybody, or is in somebody's way for longer than it runs. All
ranks must decide alike, so nothing is read here that only one of them knows.
"""

from __future__ import annotations

from typing import Any

from scheduler.prefill import Rejection, least_tokens, rejection
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.settings import settings as _settings
from sgl_ext.engine.core.slices import is_forced, is_slice

_GATED = "_sgl_ext_gated"
_expected = False


def behind_all(requests: list[Any]) -> list[Any]:
    """What arrived in one iteration, slices last."""
    global _expected
    slices = [request for request in requests if is_slice(request)]
    if not slices:
        return requests
    _expected = True
    return [request for request in requests if not is_slice(request)] + slices


def gate(scheduler: Any) -> None:
    """Refuses the slices that wait and may not run now. Run it before every iteration."""
    global _expected
    if not _expected:
        return
    # What SGLang refuses anyway, it refuses in its own words.
    slices = [r for r in scheduler.waiting_queue if is_slice(r) and r.to_finish is None]
    _expected = bool(slices)
    for req in slices:
        why, cached = _refusal(scheduler, req)
        if why is not None:
            _refuse(scheduler, req, f"{why} {cached}")


def _refusal(scheduler: Any, req: Any) -> tuple[Rejection | None, int]:
    if hasattr(req, _GATED):  # something of SGLang's holds it back
        return Rejection.BUSY, 0
    setattr(req, _GATED, True)
    tree = scheduler.tree_cache
    if not is_served_by(tree):
        return Rejection.MEMORY, 0
    tokens = req.origin_input_ids
    cached = _cached(tree, req)
    new = len(tokens) - cached
    page = tree.page_size
    chunk = scheduler.chunked_prefill_size
    longest = _settings().prefill_ahead_slice_tokens
    forced = is_forced(req)
    why = rejection(
        is_idle=_is_idle(scheduler, req),
        new_tokens=max(new, least_tokens(page)) if forced else new,
        page=page,
        slice_tokens=min(chunk, longest) if chunk and chunk > 0 else longest,
        free_tokens=_free(scheduler, tree, cached) - 2 * page,
    )
    return why, cached


def is_served_by(tree: Any) -> bool:
    """Whether a cache can be filled ahead: ours, of one kind of memory."""
    known = hasattr(tree, "worthless_tokens")
    return known and not (tree.supports_swa() or tree.supports_mamba())


def _is_idle(scheduler: Any, req: Any) -> bool:
    """Whether nothing runs or waits but this."""
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return False
    if any(other is not req for other in scheduler.waiting_queue):
        return False
    return all(one.finished() for one in scheduler.collect_inflight_reqs())


def _cached(tree: Any, req: Any) -> int:
    key = sglang_api.RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
    return int(tree.tree_core.match_full_device_prefix(key)[0])


def _free(scheduler: Any, tree: Any, cached: int) -> int:
    """What nobody misses, but for what of it the slice itself goes on from."""
    available = scheduler.token_to_kv_pool_allocator.available_size()
    return int(available + max(tree.worthless_tokens() - cached, 0))


def _refuse(scheduler: Any, req: Any, message: str) -> None:
    scheduler.abort_request(
        sglang_api.AbortReq(rid=req.rid, finished_reason={"type": "abort", "message": message})
    )
