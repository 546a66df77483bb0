"""Tables in Markdown, and how a figure is shown in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bench.report.labels import label

Figures = Mapping[str, Any]
NOT_REPORTED = "not reported"
NO_DIFFERENCE = "no difference shown"
_NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Table:
    """A table of figures. head: the first column names a row; the others have its figures.

    A value is as the bench reported it, with its spread; what a bench did not report is None.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell(value) for value in row)} |"


def cell(value: Any) -> str:
    """A value as the text of a cell."""
    return "none" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def flat(
    figures: Mapping[str, Any], left_out: Sequence[str] = (), before: str = ""
) -> Iterator[tuple[str, Any]]:
    """Numbers and texts of nested figures, by their dotted names."""
    for name, value in figures.items():
        if name in left_out:
            continue
        if isinstance(value, dict) and not is_spread(value):
            yield from flat(value, left_out, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def is_spread(value: Any) -> bool:
    """Whether it has the shape of `bench.lib.spread.Spread`."""
    return isinstance(value, Mapping) and {"median", "min", "max"} <= value.keys()


def look(figures: Mapping[str, Any], *path: str) -> Any:
    """A nested figure. None: it is missing. What is not valid on the way is returned itself."""
    found: Any = figures
    for name in path:
        if is_not_valid(found):
            break
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def is_not_valid(found: Any) -> bool:
    """Whether a bench says of this part that it could not make its load."""
    return isinstance(found, Mapping) and "not_valid" in found


def middle(value: Any) -> float | None:
    """The number, or the median of a spread; None if it is neither."""
    if is_spread(value):
        value = value["median"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def shown(value: Any) -> str:
    """A figure with its spread: `18.4 (17.9–21)`. A ratio whose spread crosses 1 says so."""
    if value is None:
        return NOT_REPORTED
    if is_not_valid(value):
        return f"not valid: {value['not_valid']}"
    if is_spread(value):
        text, rounds = number(value["median"]), value.get("rounds")
        if value["min"] != value["max"]:
            text += f" ({number(value['min'])}–{number(value['max'])})"
        return f"{text}: {NO_DIFFERENCE}" if value.get("crosses_1") and rounds != 1 else text
    return number(value)


def number(value: Any) -> str:
    """A number with at least three significant digits; anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def arms_table(
    arms: Any,
    columns: Mapping[str, Sequence[str]],
    head: str = "arm",
    labels: Mapping[str, str] = _NO_LABELS,
) -> Table:
    """A row for each arm. Columns that no arm reports are left out."""
    arms = arms or {}
    reported = {
        name: path
        for name, path in columns.items()
        if any(look(one, *path) is not None for one in arms.values())
    }
    rows = [
        (label(name, labels), *(look(one, *path) for path in reported.values()))
        for name, one in arms.items()
    ]
    return Table((head, *reported), rows)


def named_table(found: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> Table:
    """A row for each of these figures."""
    return Table(("", ""), [(name, look(found, *path)) for name, path in names.items()])


def size_of(key: str) -> str:
    """`200kb` as a person writes it."""
    return key.replace("kb", " KB").replace("mb", " MB")
