"""The tasks that start a node's processes again when they end; each can pause."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from sgl_ext.node.child import Child
from sgl_ext.node.start.failure import reason_of
from sgl_ext.supervision import supervise

_RETRY_S = 1.0
_BACKOFF_S = (1.0, 60.0)


class Keepers:
    """A task for each child, from `resume` to `pause`. Both may be called again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: tells the operator."""
        self._say = say
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    def resume(self, child: Child) -> None:
        """Keeps a child from now on."""
        if child not in self._tasks:
            # The launcher has no metrics; its log has the reason of a failure.
            name, keep = f"the restart of {child.name}", partial(keep_running, child, self._say)
            self._tasks[child] = asyncio.create_task(
                supervise(name, lambda task: None, keep, _RETRY_S)
            )

    def pause(self, child: Child) -> None:
        """Leaves a child to the caller."""
        if (task := self._tasks.pop(child, None)) is not None:
            task.cancel()

    def end(self) -> None:
        """Keeps no child any longer."""
        for child in tuple(self._tasks):
            self.pause(child)


async def keep_running(child: Child, say: Callable[[str], None]) -> None:
    """Restarts a child whenever it ends, after a delay that grows if it ends soon again."""
    shortest, longest = _BACKOFF_S
    backoff = shortest
    while True:
        started = time.monotonic()
        code = await child.wait()
        backoff = shortest if time.monotonic() - started > longest else backoff
        what = f"{child.name} ended with exit code {code} and restarts in {backoff:g} s"
        say(f"{what}:\n{reason_of(child)}")
        await asyncio.sleep(backoff)
        backoff = min(backoff * 2, longest)
        await child.start()
