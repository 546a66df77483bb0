"""The tables about fleets, gateways and whole jobs of agents, read from the figures of one step."""

from __future__ import annotations

from collections.abc import Iterator

from bench.report.labels import RECORDED_LABELS, label
from bench.report.tables import Figures, Table, arms_table, look


def recorded(found: Figures) -> Iterator[Table]:
    """One engine by the number of agents, agents within the level, routers, and gaps."""
    for engines, arms in (look(found, "agents_at") or {}).items():
        head = "agents within the level"
        names = [label(arm, RECORDED_LABELS) for arm in arms]
        title = "one engine" if engines == "1" else f"{engines} engines"
        yield Table((f"{title}: {head}", *names), [("", *arms.values())])
    columns = {
        "cached share": ("cached_share",),
        "TTFT p50, s": ("ttft_p50_s",),
        "p90, s": ("ttft_p90_s",),
        "p99, s": ("ttft_p99_s",),
        "calls, mean, s": ("call_mean_s",),
        "turns within the level": ("within",),
    }
    tables = look(found, "engine") or {}
    for number in dict.fromkeys(n for one in tables.values() for n in one):
        arms = {arm: one[number] for arm, one in tables.items() if number in one}
        if len(arms) > 2:
            yield arms_table(arms, columns, f"{number} agents, one engine", RECORDED_LABELS)
    for engines, arms in (look(found, "routers") or {}).items():
        yield arms_table(arms, columns, f"{engines} engines, 40 agents each", RECORDED_LABELS)
    gaps = look(found, "gaps") or {}
    shares = {name: (name, "cached_share") for one in gaps.values() for name in one}
    yield arms_table(gaps, shares, "cached share, by the time before a turn", RECORDED_LABELS)
    yield arms_table(
        look(found, "real", "arms"),
        {
            "cached share": ("cached_share",),
            "TTFT p50, s": ("ttft_p50_s",),
            "p90, s": ("ttft_p90_s",),
        },
        "a real engine with a small model",
        RECORDED_LABELS,
    )
