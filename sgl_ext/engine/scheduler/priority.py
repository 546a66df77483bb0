"""Priority in one scheduler: the order of its queue, and who may pass whom.

`scheduler.order` decides; here is what it is told, and done. SGLang sorts by priority and
arrival; ours ages what waits, and takes the cheapest first within a step. All ranks must do
the same, so waiting is measured by the stamps of requests and the entry rank's ticks
(`sgl_ext.engine.scheduler.clock`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from scheduler.order import Served, Waiting, in_order, step
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import count_of_ranks
from sgl_ext.engine.core.hints import hints_of
from sgl_ext.engine.core.settings import settings as _settings
from sgl_ext.engine.scheduler import single_flight
from sgl_ext.engine.scheduler.clock import keeper_of
from sgl_ext.tenants import Tenants

_ADMITTED = "_sgl_ext_admitted"
_ARRIVED = "_sgl_ext_arrived_s"
_REFUSED = "_sgl_ext_refused_s"
_PASSED = "_sgl_ext_passed"
_MATCHED_S = "_sgl_ext_matched_s"
_TRIED = "_sgl_ext_tried"
# So many that do not fit are passed in one iteration: each that is tried costs time.
_MOST_PASSED = 4
# And so many are looked up in the cache, once a tick: more are in order of what they ask for.
_MOST_MATCHED = 128
# Of this process's one scheduler.
_served = Served()
_first: Any = None


class Admitted(NamedTuple):
    """The step that a request had reached when it was admitted, and when that was."""

    step: int
    at_s: float


def order_queue(
    original: Callable[..., None], policy: Any, queue: list[Any], *args: Any, **kw: Any
) -> None:
    """Around `SchedulePolicy.calc_priority`: the waiting queue in our order."""
    global _first
    original(policy, queue, *args, **kw)
    if len(queue) > 1 and _is_ours(policy):
        now_s = keeper_of(policy).now_s
        if not policy.tree_cache.supports_fast_match_prefix():  # else SGLang has matched them
            for req in queue[:_MOST_MATCHED]:
                _match(policy.tree_cache, req, now_s)
        waiting = [_waiting(req, now_s) for req in queue]
        order = in_order(waiting, now_s, _settings().aging_s, _served.at(now_s), _weights())
        queue[:] = [queue[at] for at in order]
    _first = queue[0] if queue else None


def first_waiting() -> Any:
    """Who is first in the queue that was ordered last, None if nobody waits."""
    return _first


def defer_vain_try(original: Callable[..., bool], scheduler: Any, running_batch: Any) -> bool:
    """Around `Scheduler._should_defer_prefill`. With preemption SGLang tries to admit before every
    step of decoding, and each try costs time. Who was refused is not tried again until somebody
    comes, leaves or ends, or the clock goes on."""
    if original(scheduler, running_batch):
        return True
    state = _state(scheduler, running_batch)
    is_vain = state is not None and state == getattr(scheduler, _TRIED, None)
    setattr(scheduler, _TRIED, state)
    return is_vain


def _state(scheduler: Any, running_batch: Any) -> tuple[Any, ...] | None:
    """All that decides whether somebody can be admitted; None if there is more to it."""
    keeper, queue = keeper_of(scheduler), scheduler.waiting_queue
    if keeper is None or not queue or not scheduler.enable_priority_preemption:
        return None
    if running_batch.is_empty() or single_flight.anybody_waits():
        return None
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return None
    if scheduler.enable_hicache_storage or scheduler.enable_lmcache or scheduler.require_mlp_sync:
        return None
    if scheduler.enable_lora or scheduler.prefill_delayer or scheduler.min_free_slots_delayer:
        return None
    return len(queue), queue[-1].rid, running_batch.batch_size(), keeper.now_s


def admit(adder: Any, req: Any) -> None:
    """A request has been admitted: it keeps the step that it had reached."""
    keeper = keeper_of(adder)
    if keeper is not None and applies(req):
        now_s = keeper.now_s
        reached = step(req.priority, now_s - _arrived_s(req, now_s), _settings().aging_s)
        setattr(req, _ADMITTED, Admitted(reached, now_s))
        if reached > req.priority:
            count_of_ranks("promotions")
        waiting = _waiting(req, now_s)
        _served.add(waiting.tenant, waiting.cost_tokens, now_s)


def admitted(req: Any) -> Admitted | None:
    """How a request that runs was admitted; None if it was not by us."""
    found: Admitted | None = getattr(req, _ADMITTED, None)
    return found


def may_be_passed(adder: Any, req: Any) -> bool:
    """Whether those behind a request that does not fit are tried: for `aging_s` from the first
    time that it did not. Then it stands first until it fits, however many small ones come."""
    keeper = keeper_of(adder)
    if keeper is None or not applies(req) or adder.tree_cache.supports_mamba():
        return False
    if not hasattr(req, _REFUSED):
        setattr(req, _REFUSED, keeper.now_s)
    passed = getattr(adder, _PASSED, 0)
    setattr(adder, _PASSED, passed + 1)
    waited_s = keeper.now_s - getattr(req, _REFUSED)
    return bool(waited_s < _settings().aging_s) and passed < _MOST_PASSED


def _match(cache: Any, req: Any, now_s: float) -> None:
    """Notes how much of a waiting request is cached, which is what makes it cheap."""
    if getattr(req, _MATCHED_S, None) != now_s:
        setattr(req, _MATCHED_S, now_s)
        tokens = req.origin_input_ids + req.output_ids
        key = sglang_api.RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        matched, _, _ = cache.tree_core.match_full_device_prefix(key)
        req.num_matched_prefix_tokens = min(matched, len(tokens) - 1)


def _waiting(req: Any, now_s: float) -> Waiting:
    hints = hints_of(req)
    expected = hints.output_tokens if hints is not None else None
    uncached = len(req.origin_input_ids) + len(req.output_ids) - req.num_matched_prefix_tokens
    owner = hints.owner if hints is not None else ""
    return Waiting(req.priority, _arrived_s(req, now_s), uncached + (expected or 0), owner)


def _arrived_s(req: Any, now_s: float) -> float:
    hints = hints_of(req)
    if hints is not None:
        return hints.sent_s
    if not hasattr(req, _ARRIVED):
        setattr(req, _ARRIVED, now_s)
    return float(getattr(req, _ARRIVED))


def applies(req: Any) -> bool:
    """Whether priority scheduling is on as we know it: higher goes first, and preempts."""
    if req.priority is None:
        return False
    schedule = sglang_api.get_schedule()
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
def _weights() -> Mapping[str, float]:
    return Tenants(_settings().tenants).weights
