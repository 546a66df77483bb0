"""Priority: the order of the scheduler's queue, and which requests may pass one that does not fit.

`scheduler.order` decides. SGLang sorts by priority and arrival; the extension also ages requests
that wait, and otherwise takes the cheapest first: a token that is computed costs 1, one that is
loaded from the host a measured share, and one on the device nothing. All ranks must
decide alike, so waits are measured by the requests' timestamps and the entry rank's clock
(`sgl_ext.engine.scheduler.iteration`).
"""

from typing import Any

from scheduler.order import Waiting, due_at, in_order, step, window_of
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.scheduler.extension import SchedulerExtension, extension_of
from sgl_ext.engine.scheduler.state import Admission, state_of
from sgl_ext.engine.sglang_types import (
    Original,
    PrefillAdder,
    Req,
    ScheduleBatch,
    SchedulePolicy,
    Scheduler,
    TreeCache,
)
from sgl_ext.engine.tiers.host_tier import look_up

# In one scheduling pass at most so many requests that do not fit are passed: each try costs time.
_MOST_PASSED = 4
# At most so many are looked up in the cache, once a tick; the others count as uncached.
_MOST_MATCHED = 128


def order_queue(
    original: Original, policy: SchedulePolicy, queue: list[Req], *args: Any, **kw: Any
) -> None:
    """Around `SchedulePolicy.calc_priority`, with which a scheduling pass begins: puts the waiting
    queue in the extension's order."""
    original(policy, queue, *args, **kw)
    extension = extension_of(policy.tree_cache)
    extension.passed = 0
    extension.adder = None
    pins = extension.pins
    if len(queue) > 1 and pins is not None and _orders_by_priority(policy):
        now_s = pins.now_s
        if not policy.tree_cache.supports_fast_match_prefix():  # else SGLang has matched them
            for req in queue[:_MOST_MATCHED]:
                _match(policy.tree_cache, req, now_s)
        waiting = [_waiting(req, now_s, extension.load_share) for req in queue]
        served, aging_s = extension.served.at(now_s), extension.settings.aging_s
        waiting_s = extension.token_s * sum(one.cost_tokens for one in waiting)
        window_s = window_of(waiting_s, aging_s, max(map(_stated_window_s, queue)))
        order = in_order(waiting, now_s, aging_s, served, extension.weights, window_s)
        queue[:] = [queue[index] for index in order]
    extension.first_waiting = queue[0] if queue else None


def defer_vain_try(original: Original, scheduler: Scheduler, *given: ScheduleBatch) -> bool:
    """Around `Scheduler._should_defer_prefill`. With preemption SGLang tries to admit requests
    before every step of decoding, and each try costs time. After a try that admitted nothing, the
    next one waits until a request comes, leaves or ends, or until the clock goes on.

    given: the batch that runs, which older versions do not pass."""
    if original(scheduler, *given):
        return True
    (running_batch,) = given or (scheduler.running_batch,)
    extension = extension_of(scheduler.tree_cache)
    conditions = _conditions(extension, scheduler, running_batch)
    is_vain = conditions is not None and conditions == extension.last_try
    extension.last_try = conditions
    return is_vain


def _conditions(
    extension: SchedulerExtension, scheduler: Scheduler, running_batch: ScheduleBatch
) -> tuple[Any, ...] | None:
    """Everything that decides whether a request can be admitted; None if more decides."""
    pins, queue = extension.pins, scheduler.waiting_queue
    if pins is None or not queue or not scheduler.enable_priority_preemption:
        return None
    # A prefix that a request waited for in the last try may be cached by now.
    awaited, extension.is_prefix_awaited = extension.is_prefix_awaited, False
    if awaited or running_batch.is_empty():
        return None
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return None
    if scheduler.enable_hicache_storage or scheduler.enable_lmcache or scheduler.require_mlp_sync:
        return None
    if scheduler.enable_lora or scheduler.prefill_delayer or scheduler.min_free_slots_delayer:
        return None
    # A copy between device and host holds memory until it is done.
    cache = scheduler.tree_cache
    copies = len(cache.ongoing_write_through) + len(cache.ongoing_load_back)
    return len(queue), queue[-1].rid, running_batch.batch_size(), pins.now_s, copies


def record_admission(extension: SchedulerExtension, req: Req) -> None:
    """Records that a request is admitted, with the step that it reached by waiting."""
    pins = extension.pins
    if pins is not None and applies(req):
        now_s, state = pins.now_s, state_of(req)
        waited_s = now_s - state.arrived_s(now_s)
        reached = step(req.priority, waited_s, extension.settings.aging_s)
        state.admission = Admission(reached, now_s)
        if reached > req.priority:
            extension.count("promotions")
        waiting = _waiting(req, now_s, extension.load_share)
        extension.served.add(waiting.tenant, waiting.cost_tokens, now_s)


def may_be_passed(extension: SchedulerExtension, adder: PrefillAdder, req: Req) -> bool:
    """Whether the requests after one that does not fit are tried: for `aging_s` from the first
    time that it did not fit. From then on it stays first until it fits, however many small
    requests come."""
    pins = extension.pins
    if pins is None or not applies(req) or adder.tree_cache.supports_mamba():
        return False
    state = state_of(req)
    if state.not_fitting_since_s is None:
        state.not_fitting_since_s = pins.now_s
    passed = extension.passed
    extension.passed += 1
    waited_s = pins.now_s - state.not_fitting_since_s
    return waited_s < extension.settings.aging_s and passed < _MOST_PASSED


def _match(cache: TreeCache, req: Req, now_s: float) -> None:
    """Looks up how much of a waiting request is cached, which lowers its cost."""
    state = state_of(req)
    if state.matched_s != now_s:
        state.matched_s = now_s
        tokens = req.origin_input_ids  # not copied, unless it was preempted
        if req.output_ids:
            tokens = tokens + req.output_ids
        key = sglang_api.RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        cached = look_up(cache, key)
        # As SGLang sets them when it tries to admit a request.
        req.num_matched_prefix_tokens = min(sum(cached), len(tokens) - 1)
        req.host_hit_length = cached.on_host


def _waiting(req: Req, now_s: float, load_share: float) -> Waiting:
    state = state_of(req)
    hints = state.hints
    expected = hints.output_tokens if hints is not None else None
    uncached = len(req.origin_input_ids) + len(req.output_ids) - req.num_matched_prefix_tokens
    loaded = min(req.host_hit_length, req.num_matched_prefix_tokens)
    cost = uncached + int(loaded * load_share) + (expected or 0)
    owner = hints.owner if hints is not None else ""
    arrived_s = state.arrived_s(now_s)
    due_s = hints.due_s if hints is not None else None
    return Waiting(req.priority, arrived_s, cost, owner, due_at(arrived_s, due_s))


def _stated_window_s(req: Req) -> float:
    """How long a window was in the balancer's queue when this request left it."""
    hints = state_of(req).hints
    return 0.0 if hints is None else hints.window_s


def applies(req: Req) -> bool:
    """Whether SGLang schedules by priority in the extension's way: higher first, preempting."""
    if req.priority is None:
        return False
    args = in_effect()
    return (
        args.enable_priority_scheduling
        and not args.disable_priority_preemption
        and not args.schedule_low_priority_values_first
    )


def _orders_by_priority(policy: SchedulePolicy) -> bool:
    """Whether SGLang orders the queue by priority and arrival."""
    return (
        policy.enable_priority_scheduling
        and not policy.schedule_low_priority_values_first
        and str(policy.policy.value) == "fcfs"
    )
