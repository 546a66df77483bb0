"""No request waits on a pin: what admission refuses for want of memory is asked again without.

SGLang admits a request if what is free and what is evictable suffice, and a pinned prefix
is neither. These hooks stand around its two questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.clock import keeper_of


def add_one(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Around `PrefillAdder.add_one_req`: a request that fits without pins is admitted now."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    result = original(adder, req, *args, **kw)
    keeper = keeper_of(adder)
    if result is not AddReqResult.NO_TOKEN or keeper is None or not keeper.tokens:
        return result
    if _is_added(adder, req):
        return AddReqResult.CONTINUE  # the result is about the next one, which asks in its turn
    wanted = len(req.full_untruncated_fill_ids) - req.prefix_len
    if adder.rem_total_tokens + keeper.tokens < wanted:
        return result  # not even without any pin

    def fits() -> bool:
        nonlocal result
        if adder.rem_total_tokens >= wanted:
            result = original(adder, req, *args, **kw)
        return _is_added(adder, req)

    return AddReqResult.CONTINUE if keeper.admit(req, fits) else result


def _is_added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def add_chunk(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Around `PrefillAdder.add_chunked_req`: a chunk is neither cut short nor held up by pins."""
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
