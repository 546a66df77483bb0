"""A batch's output is sent before the scheduler does work that the output does not need.

When prompts are computed, SGLang publishes its load, stores the prompts in its tree, and then
sends their first tokens. Storing takes longer the longer a prompt is, and so does recording its
residency and its pins. Here both wait until the output is sent. They then run in their original
order, before anything else changes the tree, and on all ranks alike.
"""

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.scheduler.state import SchedulerExtension, extension_of
from sgl_ext.engine.sglang_types import Original, OutputStreamer, ScheduleBatch, Scheduler


def defer(extension: SchedulerExtension, action: Callable[[], object]) -> bool:
    """Whether an action will run after the batch's output is sent. Else it must run now."""
    if extension.after_output is None:
        return False
    extension.after_output.append(action)
    return True


def run_deferred(extension: SchedulerExtension) -> None:
    """Runs the actions that wait."""
    actions, extension.after_output = extension.after_output, None
    for action in actions or ():
        action()


def after_output(_: Any, streamer: OutputStreamer, *__: Any, **___: Any) -> None:
    """After `SchedulerOutputStreamer.stream_output`."""
    run_deferred(extension_of(streamer.tree_cache))


def send_output_first(
    original: Original, scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kw: Any
) -> None:
    """Around `Scheduler.process_batch_result`."""
    extension = extension_of(scheduler.tree_cache)
    if _can_defer(scheduler, batch):
        extension.after_output = []
    original(scheduler, batch, *args, **kw)
    run_deferred(extension)


def publish_load_later(original: Original, scheduler: Scheduler, *args: Any, **kw: Any) -> Any:
    """Around `Scheduler.publish_load_snapshot`, whose result only SGLang's load publisher reads."""
    extension = extension_of(scheduler.tree_cache)
    is_read = scheduler.load_publisher.enable
    if not is_read and defer(extension, lambda: original(scheduler, *args, **kw)):
        return None
    return original(scheduler, *args, **kw)


def _can_defer(scheduler: Scheduler, batch: ScheduleBatch) -> bool:
    """Whether prompts were computed, and nothing needs them in the tree before their output."""
    if not batch.forward_mode.is_extend() or batch.is_dllm() or scheduler.enable_hisparse:
        return False
    return bool(scheduler.disaggregation_mode.value == "null")
