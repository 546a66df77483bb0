"""What admission refuses for want of memory is asked again: without pins, then without victims.

SGLang admits a request if what is free and what is evictable suffice. A pinned prefix is
neither, and no request waits on one. What running requests hold is neither, and a much more
important request takes it from them. And one that does not fit even so lets a few smaller
ones behind it pass, for a bounded time. These hooks stand around SGLang's two questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.slices import is_slice
from sgl_ext.engine.scheduler import preemption, priority, single_flight
from sgl_ext.engine.scheduler.clock import keeper_of


def add_one(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Around `PrefillAdder.add_one_req`: a request that fits without pins, or with the memory
    of less important ones, is admitted now. One that shares a prefix in the making waits for it."""
    results = sglang_api.AddReqResult
    if is_slice(req):
        runs = not adder.can_run_list and not _is_chunked(adder, req)
        return original(adder, req, *args, **kw) if runs else results.OTHER
    if single_flight.follows(adder, req):
        return results.CONTINUE
    result = original(adder, req, *args, **kw)

    def fits() -> bool:
        nonlocal result
        result = original(adder, req, *args, **kw)
        return _is_added(adder, req)

    # Having added a request, SGLang's result is about the next one, which asks in its turn.
    is_added = _is_added(adder, req)
    if result is results.NO_TOKEN and not is_added:
        is_added = _without_pins(adder, req, fits)
    if result is results.NO_TOKEN and not is_added:
        is_added = preemption.preempt(adder, req) and fits()
    if not is_added:
        is_passed = result is results.NO_TOKEN and priority.may_be_passed(adder, req)
        return results.CONTINUE if is_passed else result
    priority.admit(adder, req)
    preemption.resumed(req)
    return results.CONTINUE if result is results.NO_TOKEN else result


def _is_chunked(adder: Any, req: Any) -> bool:
    """Whether a request would be computed in more than one chunk."""
    left = adder.rem_chunk_tokens
    return left is not None and len(req.full_untruncated_fill_ids) - req.prefix_len > left


def _without_pins(adder: Any, req: Any, fits: Callable[[], bool]) -> bool:
    keeper = keeper_of(adder)
    if keeper is None or not keeper.tokens:
        return False
    wanted = len(req.full_untruncated_fill_ids) - req.prefix_len
    if adder.rem_total_tokens + keeper.tokens < wanted:
        return False  # not even without any pin
    return bool(keeper.admit(req, lambda: adder.rem_total_tokens >= wanted and fits()))


def _is_added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def add_chunk(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Around `PrefillAdder.add_chunked_req`: a chunk is neither cut short nor held up by pins, and
    a much more important request goes first."""
    if preemption.stands_back(adder, req):
        return None
    keeper = keeper_of(adder)
    if keeper is None or not keeper.tokens:
        return original(adder, req, *args, **kw)
    if adder.rem_chunk_tokens:
        wanted = min(len(req.full_untruncated_fill_ids) - req.prefix_len, adder.rem_chunk_tokens)
        keeper.make_room(lambda: adder.rem_total_tokens >= wanted)
    result = original(adder, req, *args, **kw)

    def fits() -> bool:
        nonlocal result
        result = original(adder, req, *args, **kw)
        return bool(adder.can_run_list)

    if not adder.can_run_list:  # for want of sliding windows
        keeper.admit(req, fits)
    return result
