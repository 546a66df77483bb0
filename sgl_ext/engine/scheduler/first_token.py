"""A first token does not wait for what can be done behind it.

SGLang counts its load, puts the prompts that it has computed into its tree, and then sends what
it computed. The second takes the longer the longer a prompt is, and so does noting what is held
and pinned then. Here the tokens of a batch go first, and these come right behind them, in the
order that they had, before anything else is done to the tree. All ranks of an engine do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Of this process's one scheduler; None: nothing waits.
_waiting: list[Callable[[], object]] | None = None


def waits(action: Callable[[], object]) -> bool:
    """Whether an action will be done behind the batch's output. Else it is to be done now."""
    if _waiting is None:
        return False
    _waiting.append(action)
    return True


def settle(*_: Any, **__: Any) -> None:
    """After `SchedulerOutputStreamer.stream_output`: does what waits."""
    global _waiting
    actions, _waiting = _waiting, None
    for action in actions or ():
        action()


def send_first(
    original: Callable[..., None], scheduler: Any, batch: Any, *args: Any, **kw: Any
) -> None:
    """Around `Scheduler.process_batch_result`."""
    global _waiting
    if _is_plain(scheduler, batch):
        _waiting = []
    original(scheduler, batch, *args, **kw)
    settle()


def count_later(original: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
    """Around `Scheduler.publish_load_snapshot`, whose result only SGLang's load publisher reads."""
    is_read = scheduler.load_publisher.enable
    if not is_read and waits(lambda: original(scheduler, *args, **kw)):
        return None
    return original(scheduler, *args, **kw)


def _is_plain(scheduler: Any, batch: Any) -> bool:
    """Whether prompts were computed, and nobody needs them in the tree before their output."""
    if not batch.forward_mode.is_extend() or batch.is_dllm() or scheduler.enable_hisparse:
        return False
    return bool(scheduler.disaggregation_mode.value == "null")
