"""The tables about fleets, gateways and whole jobs of agents, read from the figures of one step."""

from __future__ import annotations

from collections.abc import Iterator

from bench.report.labels import RECORDED_LABELS, label
from bench.report.pictures import Picture
from bench.report.tables import Figures, Table, arms_table, look, named_table

_SHOWN_AGENTS = ("40", "48")


def recorded(found: Figures) -> Iterator[Table]:
    """One engine by the number of agents, agents within the level, routers, and gaps."""
    for engines, arms in (look(found, "agents_at") or {}).items():
        head = "agents within the level"
        names = [label(arm, RECORDED_LABELS) for arm in arms]
        title = "one engine" if engines == "1" else f"{engines} engines"
        yield Table((f"{title}: {head}", *names), [("", *arms.values())])
    ratios = {
        "agents within the level, each seed by itself: sgl-ext / SGLang": (
            "by_seed",
            "ours / stock",
        ),
        "the same, both with HiCache": ("by_seed", "ours_hicache / hicache"),
    }
    yield named_table(found, ratios)
    columns = {
        "cached share": ("cached_share",),
        "TTFT p50, s": ("ttft_p50_s",),
        "p90, s": ("ttft_p90_s",),
        "p99, s": ("ttft_p99_s",),
        "calls, mean, s": ("call_mean_s",),
        "turns within the level": ("within",),
    }
    tables = look(found, "engine") or {}
    for number in _SHOWN_AGENTS:
        arms = {arm: one[number] for arm, one in tables.items() if number in one}
        if arms:
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


def recorded_pictures(found: Figures) -> Iterator[Picture]:
    """Where the cache collapses, turns within the level, gaps, and routers."""
    engine = look(found, "engine") or {}
    several = {arm: one for arm, one in engine.items() if len(one) > 1}
    agents, one = "agents at once, one engine", "python -m bench.recorded --quick --part"
    share = "Prompt tokens read from the cache"
    within = "Turns within the level"
    yield _by_number("recorded-cache", share, agents, f"{one} engine", several, "cached_share")
    yield _by_number("recorded-level", within, agents, f"{one} level", several, "within")
    gaps = look(found, "gaps") or {}
    names = [*dict.fromkeys(name for arm in gaps.values() for name in arm)]
    shares = {
        label(arm, RECORDED_LABELS): [look(found, "gaps", arm, n, "cached_share") for n in names]
        for arm in gaps
    }
    title = f"{share}, by the time before a turn"
    yield Picture("recorded-gaps", title, "up to", f"{one} gaps", names, shares)
    for engines, arms in (look(found, "fleet") or {}).items():
        axis = f"agents at once, {engines} engines"
        yield _by_number("recorded-routers", within, axis, f"{one} level", arms, "within")


def _by_number(
    name: str, title: str, axis: str, command: str, arms: Figures, figure: str
) -> Picture:
    numbers = sorted({n for one in arms.values() for n in one}, key=int)
    lines = {
        label(arm, RECORDED_LABELS): [look(one, number, figure) for number in numbers]
        for arm, one in arms.items()
    }
    level = 0.95 if figure == "within" else None
    return Picture(name, title, axis, command, numbers, lines, level)
