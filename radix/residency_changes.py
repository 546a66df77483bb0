"""What changed of the segments that an engine holds, until it is published.

A tier of several engines has one that publishes its segments. That engine looks now and then at
which segments are there, and compares with the time before. A segment counts only with all that is
above it: without its beginning the end of a prefix is of no use.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple, Protocol

Stored = tuple[int, int | None, int]
"""A segment, its parent, and the prompt tokens up to its end."""


class Changes(NamedTuple):
    """What changed since the last call, in the order in which to apply it."""

    cleared: bool
    removed: list[int]
    """Each is removed from the device with everything below it."""
    stored: list[Stored]
    """On the device: new segments and segments whose tokens changed, parents first."""
    host_removed: list[int] = []  # noqa: RUF012 - callers only read it
    """Each is removed from the host with everything below it."""
    host: list[Stored] = []  # noqa: RUF012 - callers only read it
    """Segments that are now on the host alone, parents first."""


class _Entry(Protocol):
    @property
    def parent(self) -> int | None: ...

    @property
    def tokens(self) -> int: ...


class Unpublished:
    """The segments that a receiver must be sent.

    cleared: whether it must be cleared before.
    """

    def __init__(self) -> None:
        self.cleared = False
        self._changed: dict[int, int | None] = {}  # to their parents
        self._renewed: dict[int, None] = {}  # sent before what changed

    def __bool__(self) -> bool:
        return bool(self._changed or self._renewed) or self.cleared

    def note(self, segment: int, parent: int | None) -> None:
        """A segment is new, its tokens changed, or it is held no more."""
        self._changed[segment] = parent

    def note_left(self, segment: int, parent: int | None, *, is_kept: bool) -> None:
        """A segment left the device. is_kept: it stays on the host. Parents must come first."""
        if is_kept and segment in self._renewed:
            return
        self._renewed.pop(segment, None)
        self.note(segment, parent)

    def clear(self) -> None:
        """Everything is gone."""
        self._changed.clear()
        self._renewed.clear()
        self.cleared = True

    def renew(self, segments: Iterable[int]) -> None:
        """The receiver was cleared: it must be sent all of these, parents first."""
        self._renewed = dict.fromkeys(segments)
        self._changed.clear()
        self.cleared = False

    def take(
        self,
        most: int | None,
        device: Mapping[int, _Entry],
        host: Mapping[int, _Entry] | None = None,
    ) -> Changes:
        """The changes to send: those of `most` segments, first those that changed first.

        Each segment comes after its parents that are still to be sent. host: None without one.
        """
        here: Mapping[int, _Entry] = {} if host is None else host
        most = len(self._renewed) + len(self._changed) if most is None else most
        some: dict[int, int | None] = {}
        for segment in chain(self._renewed, self._changed):
            if len(some) >= most:
                break
            branch, current = list[int](), segment
            while current not in some and (current in self._changed or current in self._renewed):
                branch.append(current)
                entry = device.get(current) or here.get(current)
                above = self._changed.get(current) if entry is None else entry.parent
                if above is None:
                    break
                current = above
            for each in reversed(branch[len(some) - most :]):
                some[each] = self._changed.get(each)
        off_device = {s: p for s, p in some.items() if s in self._changed and s not in device}
        gone = {s: p for s, p in off_device.items() if host is not None and s not in host}
        for segment in some:
            self._renewed.pop(segment, None)
            self._changed.pop(segment, None)
        changes = Changes(
            self.cleared,
            _topmost(off_device),
            [(s, device[s].parent, device[s].tokens) for s in some if s in device],
            _topmost(gone),
            _parents_first({s: here[s] for s in some if s in here}),
        )
        self.cleared = False
        return changes


def _topmost(lost: Mapping[int, int | None]) -> list[int]:
    """Those of the segments whose parent, which removes what is below it, is none of them."""
    return [segment for segment, parent in lost.items() if parent not in lost]


def _parents_first(rows: Mapping[int, _Entry]) -> list[Stored]:
    """A child may have come to the host before its parent did."""
    listed: dict[int, Stored] = {}
    for segment in rows:
        branch: list[int] = []
        current: int | None = segment
        while current is not None and current in rows and current not in listed:
            branch.append(current)
            current = rows[current].parent
        for each in reversed(branch):
            listed[each] = (each, rows[each].parent, rows[each].tokens)
    return list(listed.values())


class SharedChanges(NamedTuple):
    """What changed since the time before, in the order in which to apply it."""

    removed: list[int]
    """Each is removed with everything below it."""
    stored: list[Stored]
    """New segments and segments whose tokens changed, parents first."""


class SharedSegments:
    """The published segments."""

    def __init__(self) -> None:
        self._published: dict[int, Stored] = {}

    def __len__(self) -> int:
        return len(self._published)

    def update(self, there: Mapping[int, Stored]) -> SharedChanges:
        """What changed, if these segments are there now."""
        below: defaultdict[int | None, list[Stored]] = defaultdict(list)
        for row in there.values():
            below[row[1]].append(row)
        before, now = self._published, dict[int, Stored]()
        reached = below[None]
        while reached:
            row = reached.pop()
            now[row[0]] = row
            reached += below.get(row[0], ())
        self._published = now
        lost = (row for segment, row in before.items() if segment not in now)
        removed = [segment for segment, parent, _ in lost if parent is None or parent in now]
        return SharedChanges(removed, [row for row in now.values() if before.get(row[0]) != row])
