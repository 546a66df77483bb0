"""Changes of settings without a restart: what is read again, compared, and put into effect.

    the file and the flags -- read again --> compared with the settings in effect
        --> what may change without a restart, as a new version     } the answer to the caller
        --> what stays until one, with the reason                   }

Several processes share a version by a file: the launcher and its balancer's processes, or those of
a balancer alone. One reads the settings again; the others find the version there within a second. A
process that starts later begins with it. The file holds only what was changed, and no secret.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from sgl_ext.settings.fields import fields_of
from sgl_ext.settings.schema import (
    Alias,
    BalancerSettings,
    DefaultHint,
    EngineSettings,
    LaunchSettings,
    Reload,
    RequestSettings,
    Settings,
    SettingsError,
    Tenant,
)
from sgl_ext.settings.secrets import file_version
from sgl_ext.wire.orders import Version

S = TypeVar("S", bound=Settings)
_FIELDS = {
    **fields_of(LaunchSettings),
    **fields_of(EngineSettings),
    **fields_of(BalancerSettings),
}
_ROWS: Mapping[str, tuple[type[Any], Callable[[Any], str]]] = {
    "tenants": (Tenant, lambda row: f"tenants.{row.name}"),
    "aliases": (Alias, lambda row: f"aliases.{row.name}"),
    "hints": (DefaultHint, lambda row: f"hints.{row.of}.{row.name}"),
}
_PARTS = ("engine", "balancer")  # of the launcher's settings
_OFF = Reload(why="prefill ahead is built at the start, or not: 'off' stays, and so do the others")
_ARGS = Reload(why="engines are started with SGLang's flags")


class NothingToRead(SettingsError):
    """There is no file with settings that could have changed."""


class Unchanged(NamedTuple):
    """A setting that stays as it is until a restart, and why."""

    key: str
    why: str


class Comparison(NamedTuple):
    """What differs between two settings. values: what changes, by its name in the schema."""

    changed: list[str]
    unchanged: list[Unchanged]
    values: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The answer of the admin API."""
        unchanged = [one._asdict() for one in self.unchanged]
        return {"changed": self.changed, "unchanged_until_restart": unchanged}


def in_words(document: Mapping[str, Any]) -> str:
    """What `Comparison.as_json` says, as a line of a log."""
    keys, unchanged = document["changed"], document["unchanged_until_restart"]
    changed = f"changed: {', '.join(keys)}" if keys else "nothing changed"
    kept = "; ".join(f"{one['key']} ({one['why']})" for one in unchanged)
    return changed + (f"; unchanged until a restart: {kept}" if kept else "")


def compare(before: Settings, after: Settings) -> Comparison:
    """What a reload of the settings `after` does while `before` are in effect."""
    old, new = _flat(before), _flat(after)
    changed: list[str] = []
    unchanged: list[Unchanged] = []
    values: dict[str, Any] = {}
    for name, value in new.items():
        if value == old[name]:
            continue
        reload = _reload_of(name, old[name], value)
        if reload.applies:
            changed += _keys(name, old[name], value)
            values[name] = msgspec.to_builtins(value)
        else:
            unchanged += [Unchanged(key, reload.why) for key in _keys(name, old[name], value)]
    return Comparison(changed, unchanged, values)


def with_values(settings: S, values: Mapping[str, Any]) -> S:
    """The settings with the values that they have. Raises SettingsError for a wrong one."""
    if not values:
        return settings
    whole = msgspec.to_builtins(settings)
    for part in (whole, *(whole[name] for name in _PARTS if name in whole)):
        part |= {name: value for name, value in values.items() if name in part}
    try:
        return msgspec.convert(whole, type(settings))
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings: {error}") from None


class LiveSettings(Generic[S]):
    """The settings in effect.

    start: those of this process's start. read: reads them again; None if there is no file to read.
    path: the file by which processes share a version.
    """

    def __init__(
        self, start: S, read: Callable[[], S] | None = None, path: Path | None = None
    ) -> None:
        self._start = start
        self._read = read
        self._path = path
        self._seen: object = None
        self.version = Version()
        self.refresh()

    @property
    def current(self) -> S:
        """All settings in effect."""
        return with_values(self._start, self.version.values)

    def read(self) -> S:
        """The settings as they are written now. Raises SettingsError if they are wrong, and
        NothingToRead."""
        if self._read is None:
            raise NothingToRead("config: started without --config, so there is no file to read")
        return self._read()

    def reload(self) -> Comparison:
        """Reads the settings again, and puts into effect what can change. As `read`."""
        return self.change(self.read())

    def change(self, after: S) -> Comparison:
        """Puts into effect what can change."""
        self.refresh()
        found = compare(self.current, after)
        if found.values:
            number = max(time.time_ns(), self.version.number + 1)
            self.version = Version(number, self.version.values | found.values)
            self._write()
        return found

    def refresh(self) -> bool:
        """Whether another process has made a new version. Call it periodically."""
        if self._path is None or (seen := file_version(self._path)) == self._seen:
            return False
        self._seen = seen
        with suppress(FileNotFoundError):
            found = msgspec.json.decode(self._path.read_bytes(), type=Version)
            if found.number > self.version.number:
                self.version = found
                return True
        return False

    def _write(self) -> None:
        if self._path is not None:
            draft = self._path.with_name(self._path.name + ".new")
            draft.touch(0o600)
            draft.write_bytes(msgspec.json.encode(self.version))
            draft.replace(self._path)
            self._seen = file_version(self._path)


def engine_values(version: Version) -> dict[str, Any]:
    """What a version changes in engines."""
    return {n: v for n, v in version.values.items() if n in EngineSettings.__struct_fields__}


def _reload_of(name: str, old: Any, new: Any) -> Reload:
    if name in _ROWS:
        return Reload(applies=True)
    if name == "engine_args":
        return _ARGS
    if name not in _FIELDS:  # the launcher's own
        return Reload()
    if name == "prefill_ahead" and "off" in (old, new):
        return _OFF
    return _FIELDS[name].reload


def _keys(name: str, old: Any, new: Any) -> Iterator[str]:
    """What differs, as it is called in the file."""
    if name not in _ROWS:
        yield "[engine]" if name == "engine_args" else name.replace("_", "-")
        return
    _, called = _ROWS[name]
    before, after = ({called(row): row for row in rows} for rows in (old, new))
    for key in before | after:
        if before.get(key) != after.get(key):
            yield key


def _flat(settings: Settings) -> dict[str, Any]:
    """The settings of all processes, by name. What several read is the same for all."""
    found = msgspec.structs.asdict(settings)
    for part in _PARTS:
        if isinstance(inner := found.pop(part, None), RequestSettings):
            found |= msgspec.structs.asdict(inner)
    return found
