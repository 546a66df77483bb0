"""Writes the table of clients in docs/reference/clients.md from what `make test-clients` measured:
`python -m docs.clients_table`.

A row that was not measured since the checkout was made remains as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reference") / "clients.md"
MEASURED = Path(__file__).parents[1] / ".run" / "clients"
_BEGIN, _END = "<!-- Made by `python -m docs.clients_table`. -->", "<!-- The end of that. -->"
_HEAD = "| client | version | protocol | second session, from the cache |\n|---|---|---|---|\n"
Row = tuple[str, ...]


def rows(page: str) -> dict[Row, Row]:
    """The table's rows by client and protocol."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    lines = [line.strip("|").split("|") for line in table.strip().splitlines()[2:]]
    cells = [tuple(cell.strip() for cell in line) for line in lines]
    return {(row[0], row[2]): row for row in cells}


def page(text: str, measured: Iterable[Mapping[str, Any]]) -> str:
    """The page with its table brought up to date."""
    found = rows(text)
    notes: dict[Row, dict[str, Any]] = {}
    for each in measured:
        notes.setdefault((each["client"], each["protocol"]), {}).update(each)
    for key, note in notes.items():
        old = found.get(key, ("",) * 4)
        share = f"{note['share']:g} %" if "share" in note else old[3]
        found[key] = (key[0], note["version"], key[1], share)
    body = "".join(f"| {' | '.join(found[key])} |\n" for key in sorted(found, key=_order))
    return re.sub(
        f"{re.escape(_BEGIN)}.*{re.escape(_END)}",
        lambda _: f"{_BEGIN}\n\n{_HEAD}{body}\n{_END}",
        text,
        flags=re.DOTALL,
    )


def _order(row: Row) -> Row:
    return row[0].lower(), row[1]


if __name__ == "__main__":
    notes = [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*.json"))]
    PAGE.write_text(page(PAGE.read_text(), notes))
