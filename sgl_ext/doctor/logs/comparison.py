"""Two request logs beside each other: before and after a change.

sgl-ext doctor compare before.log after.log --prices prices.toml
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from sgl_ext.doctor.logs.entry import Entry, read_entry
from sgl_ext.doctor.logs.families import Family, FamilyKey
from sgl_ext.doctor.logs.lines import NotALog, readable
from sgl_ext.doctor.logs.prices import Prices, WrongPrices, read_prices
from sgl_ext.doctor.logs.summary import Summary
from sgl_ext.doctor.logs.table import as_text
from sgl_ext.doctor.logs.versions import Versions

_SHOWN_FAMILIES = 20


class UnreadableLog(Exception):
    """A log cannot be read; the message says why."""


def main(argv: Sequence[str]) -> int:
    """Prints the comparison. Returns the exit code: 0, or 2 if a file cannot be read."""
    parser = argparse.ArgumentParser(
        prog="sgl-ext doctor compare",
        allow_abbrev=False,
        description="Compares two request logs: prompts, cached tokens, TTFT, and what they cost.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a request log")
    parser.add_argument("after", type=Path, metavar="AFTER", help="a later one")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="what a million tokens cost")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args(argv)
    try:
        prices = None if flags.prices is None else read_prices(flags.prices)
        document = compare(flags.before, flags.after, prices)
    except (UnreadableLog, WrongPrices) as error:
        print(f"sgl-ext doctor compare: {error}", file=sys.stderr)
        return 2
    if flags.json:
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_text(document), end="")
    return 0


def compare(before: Path, after: Path, prices: Prices | None = None) -> dict[str, Any]:
    """The figures of both logs, the families of their prompts, and versions that changed them.

    `saved`: what the tasks of the later log would have cost before, less what they did; null
    without prices or tasks. Raises UnreadableLog.
    """
    versions, summaries = Versions(), []
    for path in (before, after):
        summary = Summary(prices)
        for entry in entries_of(path):
            summary.add(entry)
            versions.add(entry)
        summaries.append(summary)
    figures = [summary.as_json() for summary in summaries]
    costs = [each.get("cost_per_task") for each in figures]
    saved = None
    if costs[0] is not None and costs[1] is not None:
        saved = round((costs[0] - costs[1]) * figures[1]["tasks"], 4)
    return {
        "before": figures[0],
        "after": figures[1],
        "currency": None if prices is None else prices.currency,
        "saved": saved,
        "families": _families(summaries[0], summaries[1]),
        "version_changes": [change._asdict() for change in versions.changes()],
    }


def entries_of(path: Path) -> Iterator[Entry]:
    """The answered requests of a log. Raises UnreadableLog if no line is from a request log."""
    is_empty = True
    try:
        with path.open("rb") as lines:
            for entry in readable(lines, read_entry, f"sgl-ext doctor compare: {path}"):
                is_empty = False
                if entry is not None:
                    yield entry
        if is_empty:
            raise NotALog
    except OSError as error:
        raise UnreadableLog(f"{path}: {error.strerror}") from None
    except NotALog as error:
        raise UnreadableLog(f"{path}: {error}") from None


def _families(before: Summary, after: Summary) -> list[dict[str, Any]]:
    """The families with the most tokens in both logs."""
    keys = dict.fromkeys(key for summary in (before, after) for key, _ in summary.families)
    rows = [_row(key, before, after) for key in keys]
    rows.sort(key=lambda row: -(row["before"]["prompt_tokens"] + row["after"]["prompt_tokens"]))
    return rows[:_SHOWN_FAMILIES]


def _row(key: FamilyKey, before: Summary, after: Summary) -> dict[str, Any]:
    families = [summary.families.get(key) or Family() for summary in (before, after)]
    seen = [_figures(f, s) for f, s in zip(families, (before, after), strict=True)]
    return {
        "harness": key.harness,
        "tools_hash": key.tools or None,
        "tools": max(family.tools_count for family in families),
        "versions": sorted(families[0].versions | families[1].versions),
        "before": seen[0],
        "after": seen[1],
    }


def _figures(family: Family, summary: Summary) -> dict[str, Any]:
    tokens, total = family.tokens, summary.tokens.prompt
    return {
        "requests": family.requests,
        "beginnings": len(family.beginnings),
        "prompt_tokens": tokens.prompt,
        "share": round(tokens.prompt / total, 4) if total else 0.0,
        "computed_tokens": tokens.computed,
        "cost": round(family.cost, 4),
    }
