"""Priority in one scheduler: the order of its queue, and whose memory a more important one takes.

`scheduler.order` and `scheduler.preemption` decide; here is what they are told, and done.
SGLang sorts by priority and arrival, and preempts for a free slot only. Ours ages what
waits, takes the cheapest first within a step, and preempts for memory as well. All ranks
must do the same, so waiting is measured by the stamps of requests and the entry rank's
ticks (`sgl_ext.engine.clock`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from scheduler.order import Served, Waiting, in_order, step
from scheduler.preemption import Feuds, Running, victims
from sgl_ext.engine.clock import keeper_of
from sgl_ext.engine.counters import counter
from sgl_ext.engine.hints import carried
from sgl_ext.engine.settings import EngineSettings

_ADMITTED = "_sgl_ext_admitted"  # the step it had reached, and when
_NEVER = (math.inf, 0.0)
_TIMES = "_sgl_ext_times_preempted"
_ARRIVED = "_sgl_ext_arrived_s"
_REFUSED = "_sgl_ext_refused_s"
_PASSED = "_sgl_ext_passed"
_MATCHED_S = "_sgl_ext_matched_s"
# So many that do not fit are passed in one iteration: each that is tried costs time.
_MOST_PASSED = 4
# And so many are looked up in the cache, once a tick: more are in order of what they ask for.
_MOST_MATCHED = 128
# Of this process's one scheduler.
_served = Served()
_feuds = Feuds()


def order_queue(
    original: Callable[..., None], policy: Any, queue: list[Any], *args: Any, **kw: Any
) -> None:
    """Around `SchedulePolicy.calc_priority`: the waiting queue in our order."""
    original(policy, queue, *args, **kw)
    if len(queue) > 1 and _is_ours(policy):
        now_s = keeper_of(policy).now_s
        if not policy.tree_cache.supports_fast_match_prefix():  # else SGLang has matched them
            for req in queue[:_MOST_MATCHED]:
                _match(policy.tree_cache, req, now_s)
        waiting = [_waiting(req, now_s) for req in queue]
        order = in_order(waiting, now_s, _settings().aging_s, _served.at(now_s))
        queue[:] = [queue[at] for at in order]


def admitted(adder: Any, req: Any) -> None:
    """A request has been admitted: it keeps the step that it had reached."""
    keeper = keeper_of(adder)
    if keeper is not None and _applies(req):
        now_s = keeper.now_s
        waited_s = now_s - _arrived_s(req, now_s)
        setattr(req, _ADMITTED, (step(req.priority, waited_s, _settings().aging_s), now_s))
        waiting = _waiting(req, now_s)
        _served.add(waiting.tenant, waiting.cost_tokens, now_s)


def preempt_for_slot(original: Callable[..., bool], adder: Any, req: Any) -> bool:
    """Around `PrefillAdder.preempt_to_schedule`, which SGLang asks when all slots are taken."""
    if keeper_of(adder) is None or not _applies(req):
        return original(adder, req)
    return preempt(adder, req, slots=1)


def preempt(adder: Any, req: Any, slots: int = 0) -> bool:
    """Whether requests that run were preempted, so that `req` has the memory that it misses, and
    so many slots."""
    keeper = keeper_of(adder)
    if keeper is None or not _applies(req) or adder.running_batch is None:
        return False
    batch = adder.running_batch
    now_s, settings = keeper.now_s, _settings()
    highest = req.priority - settings.preemption_threshold
    candidates = [
        (at, one)
        for at, one in enumerate(batch.reqs)
        if getattr(one, _ADMITTED, _NEVER)[0] <= highest
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
        _feuds.note(req.rid, candidates[at][1].rid)
    _take(adder, [candidates[at][0] for at in chosen])
    return True


def _missing_tokens(adder: Any, req: Any) -> int:
    """How much more memory a request needs: its prompt's rest and its answer, as SGLang counts."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    answer = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    prompt = len(req.full_untruncated_fill_ids) - req.prefix_len
    wanted = prompt + min(answer, CLIP_MAX_NEW_TOKENS) + adder.per_req_token_overhead
    return int(wanted - adder.rem_total_tokens) + 1


def may_be_passed(adder: Any, req: Any) -> bool:
    """Whether those behind a request that does not fit are tried: for `aging_s` from the first
    time that it did not. Then it stands first until it fits, however many small ones come."""
    keeper = keeper_of(adder)
    if keeper is None or not _applies(req) or adder.tree_cache.supports_mamba():
        return False
    if not hasattr(req, _REFUSED):
        setattr(req, _REFUSED, keeper.now_s)
    passed = getattr(adder, _PASSED, 0)
    setattr(adder, _PASSED, passed + 1)
    waited_s = keeper.now_s - getattr(req, _REFUSED)
    return bool(waited_s < _settings().aging_s) and passed < _MOST_PASSED


def _take(adder: Any, places: list[int]) -> None:
    """As SGLang does it for a slot: they are released now, and queued again by the scheduler."""
    from sgl_ext.engine.cache import is_publisher

    batch = adder.running_batch
    gone = set(places)
    for count, at in enumerate(sorted(gone), start=1):
        one = batch.reqs[at]
        if is_publisher():
            counter("preempted").inc()
            counter("preempted_tokens").inc(len(one.output_ids))
        setattr(one, _TIMES, getattr(one, _TIMES, 0) + 1)
        adder.memory_budget.total_offset -= adder._get_running_request_total_token_offset(one)
        adder.preempt_list.append(one)
        batch.release_req(at, len(batch.reqs) - count)
    batch.filter_batch(keep_indices=[at for at in range(len(batch.reqs)) if at not in gone])


def _running(adder: Any, req: Any) -> Running:
    reached, admitted_s = getattr(req, _ADMITTED)
    return Running(
        priority=reached,
        frees_tokens=_freed(adder, req),
        lost_tokens=len(req.output_ids),
        admitted_s=admitted_s,
        times_preempted=getattr(req, _TIMES, 0),
    )


def _freed(adder: Any, req: Any) -> int:
    """What comes free without a request: what it alone has, and what is set aside for it."""
    cache, kv = adder.tree_cache, req.kv
    own = kv.kv_allocated_len - kv.cache_protected_len
    if not (cache.supports_swa() or cache.supports_mamba()):
        before = cache.full_evictable_size()
        cache.unlock(req.lock)
        own += cache.full_evictable_size() - before
        req.lock = cache.lock(req.last_node)
    return int(own + adder._get_running_request_total_token_offset(req))


def _match(cache: Any, req: Any, now_s: float) -> None:
    """Notes how much of a waiting request is cached, which is what makes it cheap."""
    if getattr(req, _MATCHED_S, None) != now_s:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        setattr(req, _MATCHED_S, now_s)
        tokens = req.origin_input_ids + req.output_ids
        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        matched, _, _ = cache.tree_core.match_full_device_prefix(key)
        req.num_matched_prefix_tokens = min(matched, len(tokens) - 1)


def _waiting(req: Any, now_s: float) -> Waiting:
    hints = carried(req)
    expected = hints.output_tokens if hints is not None else None
    uncached = len(req.origin_input_ids) + len(req.output_ids) - req.num_matched_prefix_tokens
    owner = hints.owner if hints is not None else ""
    return Waiting(req.priority, _arrived_s(req, now_s), uncached + (expected or 0), owner)


def _arrived_s(req: Any, now_s: float) -> float:
    hints = carried(req)
    if hints is not None:
        return hints.told_s
    if not hasattr(req, _ARRIVED):
        setattr(req, _ARRIVED, now_s)
    return float(getattr(req, _ARRIVED))


def _applies(req: Any) -> bool:
    """Whether priority scheduling is on as we know it: higher goes first, and preempts."""
    if req.priority is None:
        return False
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    return bool(
        schedule.enable_priority_scheduling
        and not schedule.disable_priority_preemption
        and not schedule.schedule_low_priority_values_first
    )


def _is_ours(policy: Any) -> bool:
    """Whether the queue is in order of priority and arrival, and there is a clock."""
    return (
        policy.enable_priority_scheduling
        and not policy.schedule_low_priority_values_first
        and str(policy.policy.value) == "fcfs"
        and keeper_of(policy) is not None
    )


@cache
def _settings() -> EngineSettings:
    return EngineSettings.from_environment()
