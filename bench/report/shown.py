"""What of a report is shown: the page is drawn once from a document that notes what is read of it.

A bench prints everything that it measured. docs/benchmarks.json has what docs/measured.md and
the README show, so that a change of a figure there is a change of the page.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from bench.report.tables import is_spread

Report = Mapping[str, Any]


def only_shown(report: Report, *writers: Callable[[Report], object]) -> dict[str, Any]:
    """The report without what none of these functions reads of it."""
    noted = _noted(dict(report))
    for write in writers:
        write(noted)
    return dict(_read(noted))


class _Noted(dict[str, Any]):
    """A dict that notes of which keys the values were read."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__({name: _noted(value) for name, value in found.items()})
        self.were_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.were_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.were_read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """Without it, `{**noted}` would read the values unseen."""
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self.were_read |= set(super().keys())
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.were_read |= set(super().keys())
        return super().values()


def _noted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Noted(value)
    return [_noted(each) for each in value] if isinstance(value, list) else value


def _read(value: Any) -> Any:
    if is_spread(value):
        return dict(value)
    if isinstance(value, _Noted):
        read = ((name, each) for name, each in dict.items(value) if name in value.were_read)
        return {name: _read(each) for name, each in read}
    return [_read(each) for each in value] if isinstance(value, list) else value
