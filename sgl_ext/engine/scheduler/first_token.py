"""A batch's output is sent before the scheduler does work that the output does not need.

When prompts are computed, SGLang publishes its load, stores the prompts in its tree, and then
sends their first tokens. Storing takes longer the longer a prompt is, and so does recording its
residency and its pins. Here both wait until the output is sent. They then run in their original
order, before anything else changes the tree, and on all ranks alike.
"""

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.sglang_types import (
    Original,
    OutputStreamer,
    ScheduleBatch,
    Scheduler,
    TreeCache,
)

_ATTRIBUTE = "sgl_ext_deferred"


class Deferred:
    """What waits in one scheduler until its batch's output is sent."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] | None = None  # None while none may wait

    def begin(self) -> None:
        """From now on actions may wait."""
        self._actions = []

    def add(self, action: Callable[[], object]) -> bool:
        """Whether an action will run after the batch's output is sent. Else it must run now."""
        if self._actions is None:
            return False
        self._actions.append(action)
        return True

    def run(self) -> None:
        """Runs the actions that wait."""
        actions, self._actions = self._actions, None
        for action in actions or ():
            action()


def deferred_of(cache: TreeCache) -> Deferred:
    """What waits in the scheduler that has this cache."""
    found: Deferred | None = getattr(cache, _ATTRIBUTE, None)
    if found is None:
        found = Deferred()
        setattr(cache, _ATTRIBUTE, found)
    return found


def after_output(_: Any, streamer: OutputStreamer, *__: Any, **___: Any) -> None:
    """After `SchedulerOutputStreamer.stream_output`."""
    deferred_of(streamer.tree_cache).run()


def send_output_first(
    original: Original, scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kw: Any
) -> None:
    """Around `Scheduler.process_batch_result`."""
    deferred = deferred_of(scheduler.tree_cache)
    if _can_defer(scheduler, batch):
        deferred.begin()
    original(scheduler, batch, *args, **kw)
    deferred.run()


def publish_load_later(original: Original, scheduler: Scheduler, *args: Any, **kw: Any) -> Any:
    """Around `Scheduler.publish_load_snapshot`, whose result only SGLang's load publisher reads."""
    waits, is_read = deferred_of(scheduler.tree_cache), scheduler.load_publisher.enable
    if not is_read and waits.add(lambda: original(scheduler, *args, **kw)):
        return None
    return original(scheduler, *args, **kw)


def _can_defer(scheduler: Scheduler, batch: ScheduleBatch) -> bool:
    """Whether prompts were computed, and nothing needs them in the tree before their output."""
    if not batch.forward_mode.is_extend() or batch.is_dllm() or scheduler.enable_hisparse:
        return False
    return bool(scheduler.disaggregation_mode.value == "null")
