"""Writes the lists of docs/reference/limits.md from the code: `python -m docs.field_ranges`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sgl_ext.engine.fields.ranges import EMBEDDING, GENERATION, SAMPLING, Check

PAGE = Path(__file__).with_name("reference") / "limits.md"
_BEGIN, _END = "<!-- Made by `python -m docs.field_ranges`: {} -->", "<!-- The end of that. -->"


def page(text: str) -> str:
    """The page with its lists replaced by what the code says now."""
    only = {name: check for name, check in EMBEDDING.items() if name not in GENERATION}
    tables = {"sampling": SAMPLING, "generation": GENERATION, "embedding": only}
    for name, table in tables.items():
        begin = _BEGIN.format(name)
        made = f"{begin}\n\n{_list(table)}\n{_END}"
        pattern = rf"{re.escape(begin)}.*?{re.escape(_END)}"
        text, found = re.subn(pattern, lambda _, made=made: made, text, flags=re.DOTALL)
        if not found:
            raise ValueError(f"{PAGE} has no place for the list of {name}")
    return text


def _list(table: Mapping[str, Check]) -> str:
    """Fields of the same range are in one line."""
    rows: dict[str, list[str]] = {}
    for name, check in table.items():
        rows.setdefault(str(check), []).append(f"`{name}`")
    return "".join(f"- {', '.join(names)}: {text}\n" for text, names in rows.items())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
