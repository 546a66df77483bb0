"""Opens the sources of workers that an operator names: `file:PATH` and others.

To add a kind of source, add a line to `_KINDS`: the module and the class that is called with the
name as the operator wrote it and what stands after the colon. It raises MembershipError for what
can be known to be wrong at once. A module that needs an extra is imported only when it is named.

A file is a source that somebody else writes: an operator, a script, the launcher.

    {"workers": [{"id": "engine-0", "url": "http://10.0.0.7:30001"}]}

An entry may also have `model`, `labels` and `state`. The file is read again when it changes.
Replace it by a rename: a file that is half written is malformed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from sgl_ext.membership.member import Member, Membership, MembershipError
from sgl_ext.settings.schema import BalancerSettings, SettingsError
from sgl_ext.settings.sources import worker_url_problem

POLL_S = 0.25


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    workers: tuple[Member, ...]


_Stamp = tuple[int, int, int]


class WatchedFile:
    """Follows a file. Raises MembershipError if it cannot be read or is malformed."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._path = Path(path)
        self._read()

    async def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        known: _Stamp | None = None
        while True:
            # A thread: a file system that hangs may not stop the answers.
            stamp = await asyncio.to_thread(self._stamp)
            if stamp != known:
                known = stamp  # of before it is read: a change meanwhile is seen next time
                yield await asyncio.to_thread(self._read)
            await asyncio.sleep(POLL_S)

    def _stamp(self) -> _Stamp:
        try:
            found = self._path.stat()
        except OSError as error:
            raise self._wrong(f"cannot be read: {error.strerror}") from None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> tuple[Member, ...]:
        try:
            members = msgspec.json.decode(self._path.read_bytes(), type=_Document).workers
        except OSError as error:
            raise self._wrong(f"cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._wrong(f"is malformed: {error}") from None
        for field in ("id", "url"):
            counted = Counter(getattr(member, field) for member in members)
            if repeated := [value for value, count in counted.items() if count > 1]:
                raise self._wrong(f"{field} {repeated[0]!r} stands there more than once")
        for index, member in enumerate(members):
            if not member.id:
                raise self._wrong(f"workers[{index}].id: is empty")
            if problem := worker_url_problem(member.url):
                raise self._wrong(f"workers[{index}].url: {problem}, not {member.url!r}")
        return members

    def _wrong(self, problem: str) -> MembershipError:
        return MembershipError(f"{self._path}: {problem}")


def write_members(path: Path, members: tuple[Member, ...]) -> None:
    """Replaces the file by one with these members, readable for its owner only."""
    draft = path.with_name(path.name + ".new")
    draft.touch(0o600)
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(_Document(members))) + b"\n")
    draft.replace(path)


STATIC = "workers"


class StaticList:
    """Workers that are always there. The id of each is its URL."""

    def __init__(self, urls: Iterable[str]) -> None:
        self.name = STATIC
        unique = dict.fromkeys(url.rstrip("/") for url in urls)
        self.members = tuple(Member(id=url, url=url) for url in unique)

    async def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        yield self.members
        await asyncio.Event().wait()  # it never changes


class _Kind(NamedTuple):
    """extra: what has to be installed for it besides."""

    form: str
    module: str
    class_name: str
    extra: str = ""


_KINDS: Mapping[str, _Kind] = {
    "file": _Kind("PATH", "sgl_ext.membership.sources", "WatchedFile"),
    "kubernetes": _Kind(
        "[NAMESPACE/]SERVICE", "sgl_ext.integrations.kubernetes", "KubernetesSlices", "kubernetes"
    ),
    "ray": _Kind("ADDRESS/FLEET", "sgl_ext.integrations.ray.source", "RayFleet", extra="ray"),
}
FORMS = tuple(f"{scheme}:{kind.form}" for scheme, kind in _KINDS.items())


def open_sources(settings: BalancerSettings) -> list[Membership]:
    """All sources of a balancer, in the order in which they count. Raises SettingsError."""
    found: list[Membership] = [StaticList(settings.workers)] if settings.workers else []
    for text in settings.workers_from:
        try:
            found.append(open_source(text))
        except MembershipError as error:
            raise SettingsError(f"workers_from={text!r}: {error}") from None
    return found


def open_source(text: str) -> Membership:
    """The source that `text` names, KIND:WHAT. Raises MembershipError."""
    scheme, _, rest = text.partition(":")
    kind = _KINDS.get(scheme)
    if kind is None or not rest:
        raise MembershipError(f"must be {' or '.join(FORMS)}")
    try:
        made = getattr(import_module(kind.module), kind.class_name)(text, rest)
    except ModuleNotFoundError as missing:
        if not kind.extra or (missing.name or "").startswith("sgl_ext"):
            raise
        install = f"pip install 'sgl-ext[{kind.extra}]'"
        raise MembershipError(f"{missing.name} is not installed: {install}") from None
    return cast(Membership, made)
