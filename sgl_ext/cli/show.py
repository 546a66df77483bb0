"""How verbs print: tables for people, JSON for programs, and no text that controls a terminal.

Names of sessions, tenants and models come from clients. So every text is printed without control
characters, and never read as rich's markup.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {
    "ok": "green",
    "ready": "green",
    "done": "green",
    "starting": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "degraded": "red",
    "ended": "red",
    "waiting": "yellow",
    "stopping": "yellow",
    "stalled": "red",
    "unreachable": "red",
    "failed": "red",
    "no engine is ready": "red",
}


def plain(text: object) -> str:
    """A text in one line, without characters that could control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def cell(value: object) -> Text:
    """A value as people read it: a dash if it is unknown, large numbers in groups of digits."""
    if isinstance(value, Text):
        return value
    if value is None or value == "":
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, float):
        return Text(f"{value:,.3f}".rstrip("0").rstrip("."))
    if isinstance(value, dict | list | tuple):
        return Text(plain(json.dumps(value, ensure_ascii=False)))
    return Text(plain(value))


def state(value: object) -> Text:
    """A state in its colour."""
    return Text(plain(value), style=_STYLES.get(str(value), ""))


def console() -> Console:
    """Standard output. It has colours if it is a terminal and NO_COLOR is not set, and lines as
    long as their text if it is none, as programs read them."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    return Console(highlight=False, markup=False, emoji=False, width=10_000, no_color=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], **options: Any) -> Table:
    """A table without lines: columns of numbers, whose head begins with "#", to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", **options)
    cells = [[cell(value) for value in row] for row in rows]
    for number, head in enumerate(heads):
        made.add_column(head.lstrip("#"), justify="right" if head.startswith("#") else "left")
        if number == 0:
            # The name of a row stays whole, so that it can be copied into the next command.
            made.columns[0].min_width = max((row[0].cell_len for row in cells), default=0)
            made.columns[0].no_wrap = True
    for row in cells:
        made.add_row(*row)
    return made


def print_json(document: object) -> None:
    """Prints a document for programs."""
    print(json.dumps(document, indent=2, ensure_ascii=True))


def print_record(document: Mapping[str, Any]) -> None:
    """Prints any document: its values, then each list of objects as a table."""
    shown = console()
    lists = {key: rows for key, rows in document.items() if _is_table(rows)}
    grid = Table.grid(padding=(0, 2))
    for key, value in document.items():
        if key not in lists:
            grid.add_row(Text(plain(key), style="bold"), cell(value))
    shown.print(grid)
    for key, rows in lists.items():
        heads = list(dict.fromkeys(name for row in rows for name in row))
        marked = [f"#{head}" if _are_numbers(rows, head) else head for head in heads]
        shown.print()
        shown.print(Text(plain(key), style="bold"))
        shown.print(table(list(map(plain, marked)), [[r.get(h) for h in heads] for r in rows]))


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _are_numbers(rows: Iterable[Mapping[str, Any]], head: str) -> bool:
    return all(isinstance(row.get(head), int | float | None) for row in rows)


def warn(message: str) -> None:
    """Prints a message on stderr. Only what a node sends can have several lines, as a log does."""
    print("sgl-ext:", "\n".join(map(plain, message.splitlines())), file=sys.stderr)


def duration(seconds: float) -> str:
    """A time in its two largest units: `3 d 4 h`, `5 min 6 s`, `7 s`."""
    whole = max(int(seconds), 0)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def percent(share: float | None) -> str | None:
    """A share between 0 and 1 for people."""
    return None if share is None else f"{share:.1%}"
