"""Hooks on each iteration of the scheduler: time and orders come in, events go out.

All ranks of an engine must decide alike, so none of them reads a clock to decide. The entry rank
broadcasts its clock together with the requests: a tick a second while there are pins or work, and
at once when the HTTP process wants a prefix to be unpinned, or settings to be changed.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.scheduler.event_publisher import EventChannel, EventPublisher
from sgl_ext.engine.scheduler.extension import SchedulerExtension, extension_of
from sgl_ext.engine.scheduler.nodes import clock_s
from sgl_ext.engine.scheduler.state import compare, data_parallel_rank
from sgl_ext.engine.sglang_types import NextBatchPlan, Original, ScheduleBatch, Scheduler
from sgl_ext.wire.orders import Order, Orders

TICK_S = 1.0
_logger = logging.getLogger(__name__)


def send_orders(aborts: list[Any], scheduler: Scheduler) -> list[Any]:
    """After `Scheduler._poll_timeout_aborts`, which runs on entry ranks: adds an order if one is
    due.

    With --scheduler-recv-interval SGLang drops what it is given in most iterations. So an order is
    sent until it arrives.
    """
    extension = extension_of(scheduler.tree_cache)
    pins, cache = extension.pins, extension.cache
    if pins is None or cache is None:
        return aborts
    if extension.is_entry_rank:
        extension.wanted = extension.orders.take(extension.wanted)
    wanted = extension.wanted
    now_s, cost = clock_s(), cache.loads.cost
    costs = cost.share, cost.token_s
    is_due = now_s >= pins.now_s + TICK_S and (
        len(pins.pins)
        or costs != (extension.load_share, extension.token_s)
        or scheduler.waiting_queue
        or not scheduler.running_batch.is_empty()
    )
    is_wanted = wanted.unpin or wanted.settings or wanted.store
    if not (is_due or is_wanted):
        return aborts
    store = tuple(cache.worth_storing()) if wanted.store else None
    return [*aborts, Order(now_s, wanted.unpin, wanted.settings, store, *costs)]


def take_orders(
    original: Callable[[Scheduler, list[Any]], None], scheduler: Scheduler, requests: list[Any]
) -> None:
    """Around `Scheduler.process_input_requests`: carries out orders, and hands the rest on."""
    extension = extension_of(scheduler.tree_cache)
    orders = [request for request in requests if isinstance(request, Order)]
    if orders:
        requests = [request for request in requests if not isinstance(request, Order)]
        pins = extension.pins
        assert pins is not None, "only a scheduler that has pins sends orders"
        extension.wanted = Orders()
        for order in orders:
            compare("%s", order)
            pins.advance(order.now_s)
            pins.release_named(order.unpin)
            extension.change(order.settings)
            extension.load_share, extension.token_s = order.load_share, order.token_s
            if order.store is not None and extension.cache is not None:
                extension.leaving = extension.cache.leave(order.store)
    if extension.leaving is not None and extension.leaving.step():
        extension.leaving = None
        if extension.publisher is not None:
            extension.publisher.stored()
    original(scheduler, requests)


def note_plan(plan: NextBatchPlan, scheduler: Scheduler, *_: Any, **__: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`: notes what the scheduler runs next. Publishes if it
    is idle, as no output comes then.

    With overlap scheduling the last batch's output is not sent yet: the scheduler is idle only
    once there is no last batch either.
    """
    extension = extension_of(scheduler.tree_cache)
    publisher = _publisher(extension, scheduler)
    if publisher is None:
        return
    publisher.plan = plan
    if plan.batch_to_run is None and scheduler.last_batch is None:
        publisher.publish(time.monotonic(), load_share=extension.load_share)


def publish_events(
    original: Original, scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kw: Any
) -> None:
    """Around `Scheduler.process_batch_result`: publishes what changed once the output is sent, and
    notes what its prompts took."""
    original(scheduler, batch, *args, **kw)
    extension = extension_of(scheduler.tree_cache)
    if extension.cache is not None:
        extension.cache.loads.computed(scheduler, batch)
    publisher = _publisher(extension, scheduler)
    if publisher is not None:
        publisher.publish(time.monotonic(), batch, extension.load_share)


def _publisher(extension: SchedulerExtension, scheduler: Scheduler) -> EventPublisher | None:
    """Publishes for the engine; None on ranks that do not."""
    if not extension.is_entry_rank:
        return None
    if extension.publisher is None:
        if extension.cache is None:
            name = type(scheduler.tree_cache).__name__
            _logger.warning(f"sgl-ext: {name} is SGLang's own: only its load is published")
        channel, stages = EventChannel(data_parallel_rank()), in_effect().pp_size
        extension.publisher = EventPublisher(scheduler, extension.cache, channel, stages)
    return extension.publisher
