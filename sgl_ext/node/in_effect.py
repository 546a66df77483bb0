"""The settings that a node uses, each with where it comes from: a file in its run folder.

    flags and file --> start --> reloads --> restarts with other flags
                                                |
        sgl-ext config show --running <-- settings.json

No secret is in it. It is written again when something has changed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sgl_ext.node.child import Child
from sgl_ext.node.children import Engine, request_log_of, store_of
from sgl_ext.settings.reloading import LiveSettings
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.sources import setting_rows

Row = dict[str, Any]
RESTARTED = "sgl-ext restart"


def in_effect_path(logs: Path) -> Path:
    """The file in a node's run folder."""
    return logs / "settings.json"


class SettingsInEffect:
    """What one node uses now.

    sources: tells what is written now, and where each setting stands. Raises SettingsError.
    """

    def __init__(
        self,
        live: LiveSettings[LaunchSettings],
        engines: Sequence[Child],
        sources: Callable[[], tuple[LaunchSettings, Mapping[str, str]]],
    ) -> None:
        self._live = live
        self._engines = engines
        self._sources = sources
        self._path = in_effect_path(Path(live.current.log_dir))
        self._version = live.version.number
        self._rows = setting_rows(self._current(), sources()[1])
        self._written: list[Row] = []

    def _current(self) -> LaunchSettings:
        """With the places that are chosen where none is given."""
        settings = self._live.current
        request_log, store = request_log_of(settings), store_of(settings)
        return replace(
            settings, balancer=replace(settings.balancer, request_log=request_log, store=store)
        )

    def rows(self) -> list[Row]:
        """All settings, and what engines have that were restarted with others."""
        if self._version != self._live.version.number:
            self._version = self._live.version.number
            try:
                names = self._sources()[1]
            except SettingsError:  # the file was changed again, and is wrong
                names = {}
            before = {row["key"]: row for row in self._rows}
            rows = setting_rows(self._current(), names)
            self._rows = [
                same if (same := before.get(r["key"])) and same["value"] == r["value"] else r
                for r in rows
            ]
        return [*self._rows, *(row for engine in self._engines for row in _restarted(engine))]

    def write(self) -> None:
        """Writes the file if something has changed. It waits for the disk. Raises OSError."""
        rows = self.rows()
        if rows == self._written:
            return
        draft = self._path.with_name(self._path.name + ".new")
        draft.touch(0o600)
        draft.write_bytes(msgspec.json.encode(rows))
        draft.replace(self._path)
        self._written = rows


def _restarted(engine: Child) -> list[Row]:
    """What an engine's last restart gave it."""
    if not isinstance(engine, Engine):
        return []
    now = {row["key"]: row["value"] for row in setting_rows(engine.settings, {})}
    launched = {row["key"]: row["value"] for row in setting_rows(engine.launched, {})}
    return [
        {"key": f"{engine.name}: {key}", "value": value, "source": RESTARTED}
        for key, value in now.items()
        if value != launched.get(key)
    ]
