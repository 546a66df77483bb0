"""What was found, as text for people or as JSON for machines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_ext.doctor.advice import advice, meaning

_WIDTH = 96
_HEAD = ("tokens", "share", "times", "where", "between", "what")
_BETWEEN = {"session": "turns", "fleet": "sessions"}


def with_advice(document: Mapping[str, Any]) -> dict[str, Any]:
    """The findings, each with what it means and what to do about it."""
    return {
        "harnesses": [
            told
            | {
                "findings": [
                    row
                    | {"means": meaning(row["kind"]), "advice": advice(row["kind"], row["part"])}
                    for row in told["findings"]
                ]
            }
            for told in document["harnesses"]
        ]
    }


def as_text(document: Mapping[str, Any]) -> str:
    """The report: a table a harness and model, and under it what to do."""
    harnesses = document["harnesses"]
    if not harnesses:
        return "No prompts yet: there is nothing to tell.\n"
    return "\n".join(_of_harness(told) for told in harnesses)


def _of_harness(told: Mapping[str, Any]) -> str:
    model = f", model {_plain(told['model'])}" if told["model"] else ""
    title = f"{_plain(told['harness'])}{model}: "
    prompts = "prompt" if told["prompts"] == 1 else "prompts"
    title += f"{told['prompts']:,} {prompts}, {told['prompt_tokens']:,} tokens"
    if not told["findings"]:
        return f"{title}\n  Nothing diverges: prompts begin as those before them.\n"
    total = told["prompt_tokens"]
    share = f" ({told['lost_tokens'] / total:.1%})" if total else ""
    title += f", of them {told['lost_tokens']:,}{share} computed again"
    rows = [_HEAD, *(_cells(row) for row in told["findings"])]
    lines = [title, *_table(rows), "  What to do:"]
    said: dict[str, list[str]] = {}
    for row in told["findings"]:
        places = said.setdefault(advice(row["kind"], row["part"]), [])
        if row["where"] not in places:
            places.append(row["where"])
    for what, places in said.items():
        text = f"{_plain(', '.join(places))}: {what}."
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    between = _BETWEEN.get(row["scope"], row["scope"])
    counts = (f"{row['tokens']:,}", f"{row['share']:.1%}", f"{row['times']:,}")
    return (*counts, _plain(row["where"]), between, f"{row['kind']}: {meaning(row['kind'])}")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers to the right, words to the left."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEAD))]
    return [
        "  "
        + "  ".join(
            cell.rjust(widths[n]) if n < 3 else cell.ljust(widths[n]) for n, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _plain(text: object) -> str:
    """A client's word as one that a terminal may show."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
