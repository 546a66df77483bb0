"""LoRA: a request that others pass holds no place for its adapter.

One batch takes a few adapters at most. In a scheduling pass SGLang counts the adapter of each
request that it has tried, admitted or not. SGLang itself ends the pass at the first one that is not
admitted, but here others may pass it.
"""

from sgl_ext.engine.scheduler.state import extension_of
from sgl_ext.engine.sglang_types import Original, PrefillAdder, Req, Scheduler


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
