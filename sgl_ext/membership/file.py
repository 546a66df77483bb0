"""The source that is a file, which somebody else writes: an operator, a script, the launcher.

    {"workers": [{"id": "engine-0", "url": "http://10.0.0.7:30001"}]}

An entry may also have `model`, `labels` and `state`. The file is read again when it changes.
Replace it by a rename: a file that is half written is malformed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from sgl_ext.membership.member import Member, MembershipError
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
