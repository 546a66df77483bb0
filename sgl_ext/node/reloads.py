"""Reads the node's settings again, for the launcher and for what it starts from then on.

The launcher writes what changed into a file of its log directory, which its balancer looks at. The
balancer applies it, and sends engines their part. An engine that is started later has it at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_ext.balancer.reporting.event_log import EventLog
from sgl_ext.node.child import FLEET, Child
from sgl_ext.settings.reloading import LiveSettings, NothingToRead, in_words
from sgl_ext.settings.schema import LaunchSettings, SettingsError


def changes_path(log_dir: Path) -> Path:
    """The file with what was changed since the launcher's start."""
    return log_dir / "changed.json"


def live_settings(
    start: LaunchSettings, read: Callable[[], LaunchSettings] | None
) -> LiveSettings[LaunchSettings]:
    """The settings of a launcher that starts: what an earlier one has changed does not count."""
    path = changes_path(Path(start.log_dir))
    path.unlink(missing_ok=True)
    return LiveSettings(start, read, path)


class Reloads:
    """The reloads of one launcher, one at a time. say, refuse: tell the operator what was done, and
    that nothing was."""

    def __init__(
        self,
        live: LiveSettings[LaunchSettings],
        engines: Sequence[Child],
        say: Callable[[str], None],
        refuse: Callable[[str], None],
        events: EventLog | None = None,
    ) -> None:
        self._live = live
        self._engines = engines
        self._say = say
        self._refuse = refuse
        self._events = events or EventLog()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self) -> dict[str, Any]:
        """Reads the settings again, and tells what changed and what did not. Raises SettingsError
        if they are wrong, and NothingToRead; nothing changes then."""
        async with self._lock:
            try:
                # It may read large files, to check them.
                found = self._live.change(await asyncio.to_thread(self._live.read))
            except NothingToRead as error:
                self._refuse(f"reload: {error}")
                raise
            except SettingsError as error:
                self._refuse(f"reload: {error}; nothing was changed")
                self._events.add("reload refused", "node", str(error))
                raise
        settings = self._live.current
        for child in self._engines:
            own = settings if child.name == FLEET else settings.engine
            child.change_environment(own.to_environment())
        document = found.as_json()
        self._say(f"reload: {in_words(document)}")
        self._events.add("reloaded", "node", in_words(document))
        return document

    def begin(self) -> None:
        """Reloads in the background. What comes of it is said."""
        task = asyncio.create_task(self._quietly())
        self._tasks.add(task)  # an event loop keeps no reference to it
        task.add_done_callback(self._tasks.discard)

    async def _quietly(self) -> None:
        try:
            await self.reload()
        except SettingsError:
            return  # it was said
