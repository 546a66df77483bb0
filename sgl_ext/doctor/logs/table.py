"""A comparison of two logs as tables for people."""

from collections.abc import Mapping
from typing import Any

from sgl_ext.doctor.report import aligned, plain

# Each figure's name and form.
_FIGURES = (
    ("requests", "requests", "{:,}"),
    ("tasks", "tasks", "{:,}"),
    ("requests_per_task_p50", "requests of a task, p50", "{:,.0f}"),
    ("prompt_tokens_p50", "prompt tokens, p50", "{:,}"),
    ("prompt_tokens_p90", "prompt tokens, p90", "{:,}"),
    ("prompt_tokens_max", "prompt tokens, most", "{:,}"),
    ("tools_p50", "tools, p50", "{:,}"),
    ("same_prefix_share", "turns that begin as before", "{:.1%}"),
    ("same_tools_share", "turns with the same tools", "{:.1%}"),
    ("cached_share", "prompt tokens read from the cache", "{:.1%}"),
    ("cached_share_p10", "  of a request, p10", "{:.1%}"),
    ("cached_share_p50", "  of a request, p50", "{:.1%}"),
    ("cached_share_p90", "  of a request, p90", "{:.1%}"),
    ("ttft_ms_p50", "TTFT in ms, p50", "{:,.0f}"),
    ("ttft_ms_p90", "TTFT in ms, p90", "{:,.0f}"),
    ("ttft_ms_p99", "TTFT in ms, p99", "{:,.0f}"),
    ("computed_per_task", "tokens of a task: computed", "{:,}"),
    ("read_per_task", "tokens of a task: read from the cache", "{:,}"),
    ("output_per_task", "tokens of a task: generated", "{:,}"),
    ("cost", "cost", "{:,.2f}"),
    ("cost_per_task", "cost of a task", "{:,.4f}"),
)
_TOOLS_HASH_CHARS = 8


def as_text(document: Mapping[str, Any]) -> str:
    """The comparison: figures, families, versions that changed them, and what was saved."""
    before, after = document["before"], document["after"]
    rows = [("", "before", "after", "change")]
    for key, name, form in _FIGURES:
        if key in before:
            rows.append((name, *_pair(form, before[key], after[key])))
    lines = aligned(rows, range(1, 4))
    if document["families"]:
        lines += ["", "Families of prompts (the same harness and tools):"]
        lines += aligned(_family_rows(document), range(3, 8))
    for change in document["version_changes"]:
        about = {key: plain(value) for key, value in change.items()}
        lines.append(
            "\n{harness} {earlier} -> {later}: its {what} changed, so that no prompt begins like "
            "one of the version before.".format(**about)
        )
    if document["saved"] is not None:
        saved, unit = document["saved"], plain(document["currency"])
        word = "less" if saved >= 0 else "more"
        lines.append(
            f"\nThe {after['tasks']:,} tasks of the later log cost {abs(saved):,.2f} {unit} {word} "
            "than at the earlier cost of a task.".replace("  ", " ")
        )
    return "\n".join(lines) + "\n"


def _pair(form: str, before: float | None, after: float | None) -> tuple[str, str, str]:
    shown = ["-" if value is None else form.format(value) for value in (before, after)]
    change = ""
    if before and after is not None and form != "{:.1%}":
        change = f"{after / before - 1:+.1%}"
    elif before is not None and after is not None and form == "{:.1%}":
        change = f"{(after - before) * 100:+.1f} points"
    return shown[0], shown[1], change


def _family_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    head: tuple[str, ...] = ("harness", "versions", "tools", "requests", "share", "computed")
    head += ("beginnings",)
    has_cost = document["currency"] is not None
    rows = [(*head, "cost") if has_cost else head]
    for row in document["families"]:
        sides = row["before"], row["after"]
        hash_ = f" ({row['tools_hash'][:_TOOLS_HASH_CHARS]})" if row["tools_hash"] else ""
        cells = (
            plain(row["harness"]),
            plain(", ".join(row["versions"])) or "-",
            f"{row['tools']}{hash_}",
            " -> ".join(f"{side['requests']:,}" for side in sides),
            " -> ".join(f"{side['share']:.1%}" for side in sides),
            " -> ".join(f"{side['computed_tokens']:,}" for side in sides),
            " -> ".join(f"{side['beginnings']:,}" for side in sides),
        )
        cost = (" -> ".join(f"{side['cost']:,.2f}" for side in sides),)
        rows.append((*cells, *cost) if has_cost else cells)
    return rows
