"""Hooks on admission: a request that does not fit is tried again without pins, then with victims.

SGLang admits a request if the memory that is free or evictable is enough. Pinned prefixes are
neither, and a request never waits because of a pin. The memory of running requests is neither, and
a much more important request takes it from them. If a request still does not fit, some that are
queued after it may pass, for a limited time.
"""

from collections.abc import Callable
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.slices import is_slice
from sgl_ext.engine.scheduler import preemption, priority, single_flight
from sgl_ext.engine.scheduler.state import SchedulerExtension, extension_of
from sgl_ext.engine.sglang_types import AddReqResult, Original, PrefillAdder, Req


def add_one(
    original: Original,
    adder: PrefillAdder,
    req: Req,
    has_chunked_req: bool,
    *args: Any,
    **kw: Any,
) -> AddReqResult:
    """Around `PrefillAdder.add_one_req`: admits a request if it fits without pins, or with the
    memory of less important ones. A request whose prefix is being computed waits for it.

    SGLang tracks one unfinished prompt. Its chunk takes all memory that there is, so that no other
    one is cut into chunks beside it; memory that is freed here must not change that.
    """
    results = sglang_api.AddReqResult
    if is_slice(req):
        runs = not adder.can_run_list and not _is_chunked(adder, req, req.host_hit_length)
        result = original(adder, req, has_chunked_req, *args, **kw) if runs else results.OTHER
        _count_refused_load(adder, req)
        return result
    # A load may still be refused, and then all of the prompt is computed.
    is_other_unfinished = has_chunked_req or adder.new_chunked_req is not None
    if is_other_unfinished and _is_chunked(adder, req):
        return results.OTHER
    extension = extension_of(adder.tree_cache)
    extension.adder = adder
    if single_flight.must_wait(extension, adder, req):
        return results.CONTINUE
    result = original(adder, req, has_chunked_req, *args, **kw)

    def fits() -> bool:
        nonlocal result
        result = original(adder, req, has_chunked_req, *args, **kw)
        return _is_added(adder, req)

    # Once a request is added, SGLang's result is about the next one, which is tried by itself.
    is_added = _is_added(adder, req)
    if result is results.NO_TOKEN and not is_added:
        is_added = _fits_without_pins(extension, adder, req, fits)
    if result is results.NO_TOKEN and not is_added:
        is_added = preemption.preempt_for_memory(extension, adder, req) and fits()
    if not is_added:
        is_passed = result is results.NO_TOKEN and priority.may_be_passed(extension, adder, req)
        return results.CONTINUE if is_passed else result
    priority.record_admission(extension, req)
    _count_refused_load(adder, req)
    preemption.count_recomputed(extension, req)
    return results.CONTINUE if result is results.NO_TOKEN else result


def add_chunk(original: Original, adder: PrefillAdder, req: Req, *args: Any, **kw: Any) -> Any:
    """Around `PrefillAdder.add_chunked_req`: pins neither shorten nor delay a chunk, and a much
    more important request goes first."""
    extension = extension_of(adder.tree_cache)
    if preemption.interrupts(extension, adder, req):
        return None
    pins, pressure = extension.pins, extension.pressure
    if pins is None or pressure is None or not pins.tokens:
        return original(adder, req, *args, **kw)
    if adder.rem_chunk_tokens:
        wanted = min(_new_tokens(req), adder.rem_chunk_tokens)
        pressure.make_room(lambda: adder.rem_total_tokens >= wanted)
    result = original(adder, req, *args, **kw)

    def fits() -> bool:
        nonlocal result
        result = original(adder, req, *args, **kw)
        return bool(adder.can_run_list)

    if not adder.can_run_list:  # the sliding windows' memory is too small
        pressure.admit(req, fits)
    return result


def _new_tokens(req: Req) -> int:
    """The tokens that need memory: those that the host loads, too."""
    return len(req.full_untruncated_fill_ids) - req.prefix_len


def _is_chunked(adder: PrefillAdder, req: Req, loaded: int = 0) -> bool:
    """Whether a request would be computed in more than one chunk, if so many tokens are loaded."""
    chunk = adder.rem_chunk_tokens
    return chunk is not None and _new_tokens(req) - loaded > chunk


def _count_refused_load(adder: PrefillAdder, req: Req) -> None:
    """Counts tokens that an admitted request computes though the host has them."""
    if _is_added(adder, req):
        missing = max(req.host_hit_length - req.host_loaded_length, 0)
        extension_of(adder.tree_cache).count("host_tokens_computed", missing)


def _fits_without_pins(
    extension: SchedulerExtension, adder: PrefillAdder, req: Req, fits: Callable[[], bool]
) -> bool:
    pins, pressure = extension.pins, extension.pressure
    if pins is None or pressure is None or not pins.tokens:
        return False
    wanted = _new_tokens(req)
    if adder.rem_total_tokens + pins.tokens < wanted:
        return False  # it would not fit without any pin
    return pressure.admit(req, fits, lambda: adder.rem_total_tokens >= wanted)


def _is_added(adder: PrefillAdder, req: Req) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req
