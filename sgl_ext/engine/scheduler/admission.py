"""Hooks on admission: a request that does not fit is tried again without pins, then with victims.

SGLang admits a request if the memory that is free or evictable is enough. Pinned prefixes are
neither, and a request never waits because of a pin. The memory of running requests is neither, and
a much more important request takes it from them. If a request still does not fit, some that are
queued after it may pass, for a limited time.

Requests that share an uncached prefix compute it once: the others wait until it is cached.

SGLang admits every request that fits, so sub-agents that start together would each compute their
common prompt. Here a request lets others pass while another one, its leader, computes tokens that
the request would compute itself, and will cache them soon:

    |---- cached ----|---- computed by the leader ----|---- its own ----|
                     start                            end

A request waits for one forward pass or one chunk at a time, never for an answer. The leader
computes the same tokens and is ahead already, so waiting costs no more than computing. Prefills
end and a request has few leaders, so waiting ends, too.

A request that others pass holds no place for its LoRA adapter, either. One batch takes a few
adapters at most. In a scheduling pass SGLang counts the adapter of each request that it has tried,
admitted or not. SGLang itself ends the pass at the first one that is not admitted, but here others
may pass it.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.hints import is_slice
from sgl_ext.engine.core.shared_prefixes import common_tokens, tokens_in_common
from sgl_ext.engine.scheduler import preemption, priority
from sgl_ext.engine.scheduler.extension import SchedulerExtension, extension_of
from sgl_ext.engine.scheduler.state import state_of
from sgl_ext.engine.sglang_types import (
    AddReqResult,
    Original,
    PrefillAdder,
    Req,
    Scheduler,
    TreeCache,
)

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


def count_admitted(
    original: Original, scheduler: Scheduler, req: Req, running: set[str | None]
) -> bool:
    """Around `Scheduler.can_schedule_lora_req`. running: the adapters that the pass counts; those
    of requests that were only tried are removed."""
    if (adder := extension_of(scheduler.tree_cache).adder) is not None:
        running &= _held(adder)
    may_run: bool = original(scheduler, req, running)
    return may_run


def _held(adder: PrefillAdder) -> set[str | None]:
    """The adapters of requests that run or were admitted; None is the model without one."""
    batch = adder.running_batch
    running = [] if batch is None else [one for one in batch.reqs if not one.finished()]
    return {one.lora_id for one in [*running, *adder.can_run_list]}


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
    if must_wait(extension, adder, req):
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
