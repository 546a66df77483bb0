"""The tables about the balancer and its parts, read from the figures of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.report.labels import OURS, label
from bench.report.tables import Figures, Table, arms_table, look, named_table, size_of

_DECISIONS = {
    f"{OURS}, whole decision": ("ours_us", "decision_p50"),
    f"{OURS}, lookup": ("ours_us", "lookup_p50"),
    f"{label('dynamo')}, lookup": ("dynamo_us", "lookup_p50"),
    "Dynamo, whole decision": ("dynamo_us", "decision_p50"),
}
"""Where the times of decisions are, by what they are of."""


def routing(found: Figures) -> Iterator[Table]:
    rows = [
        (
            label(name),
            *(look(one, f"ttft_p{percent}_ms") for percent in (50, 99)),
            look(one, "share_of_ideal"),
            look(one, "load_max_over_mean"),
        )
        for name, one in _routers(found).items()
    ]
    head = ("router", "TTFT p50, ms", "p99", "share of ideal cache", "load, most / mean")
    yield Table(head, rows)


def proxy_profile(found: Figures) -> Iterator[Table]:
    sizes = {name: steps for name, steps in found.items() if isinstance(steps, Mapping)}
    names = dict.fromkeys(step for steps in sizes.values() for step in steps)
    rows = [(label(name), *(look(steps, name) for steps in sizes.values())) for name in names]
    heads = (f"body of {size_of(size)}, microseconds" for size in sizes)
    yield Table(("step", *heads), rows)


_JUDGED = {
    "TTFT p50, ms": "ttft_ms_p50",
    "TTFT p99, ms": "ttft_ms_p99",
    "cached share, by the judge": "cached_share",
    "by the engines": "engines_cached_share",
}


def judges(found: Figures) -> Iterator[Table]:
    rows: list[tuple[Any, ...]] = []
    ratios: list[tuple[Any, ...]] = []
    for judge, loads in found.items():
        for load, arms in loads.items() if isinstance(loads, Mapping) else ():
            named = {name: arm for name, arm in arms.items() if isinstance(arm, Mapping)}
            ratio = named.pop("stock_over_ours_ttft_p50", None)
            of = f"{judge}, {load}: "
            rows += [
                (of + label(name), arm["refused"], *[""] * (len(_JUDGED) - 1))
                if "refused" in arm
                else (of + label(name), *(arm.get(key) for key in _JUDGED.values()))
                for name, arm in named.items()
            ]
            if ratio:
                ratios.append((f"TTFT p50, {judge}, {load}: SGLang / sgl-ext", ratio))
    yield Table(("judge, load, arm", *_JUDGED), rows)
    yield Table(("", ""), ratios)


# The chart has it too.
_BETWEEN = ("2kb",)


def proxy(found: Figures) -> Iterator[Table]:
    columns = {
        "CPU, microseconds a request": "cpu_us_per_request",
        "requests per second": "rps",
        "added TTFT, ms": "added_ttft_p50_ms",
    }
    every = _proxies(found)
    for size in dict.fromkeys(size for sizes in every.values() for size in sizes):
        if size in _BETWEEN:
            continue
        rows = [
            (label(name), *(look(sizes, size, key) for key in columns.values()))
            for name, sizes in every.items()
        ]
        yield Table((f"body of {size_of(size)}", *columns), rows)
    if every.keys() - {"ours", "nginx"}:
        best = {"sgl-ext is the best of these routers in each column": ("first_in_every_column",)}
        yield named_table(found, best)


def index(found: Figures) -> Iterator[Table]:
    rows = [
        (int(workers), *(look(cell, *place) for place in _DECISIONS.values()))
        for workers, cell in (look(found, "by_workers") or {}).items()
    ]
    yield Table(("engines", *(f"{head}, microseconds" for head in _DECISIONS)), rows)
    yield named_table(
        found,
        {
            "bytes per segment": ("bytes_per_segment",),
            "bytes per segment, Dynamo's index": ("dynamo", "bytes_per_segment"),
        },
    )


def tool_loop(found: Figures) -> Iterator[Table]:
    yield arms_table(
        {name: one for name, one in found.items() if isinstance(one, Mapping)},
        {"20 calls, ms": ("loop_ms",), "bytes sent": ("sent_bytes",)},
    )


def _routers(found: Figures) -> dict[str, Figures]:
    """The figures of each router, by its name."""
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, Mapping) and look(one, "ttft_p50_ms") is not None
    }


def _proxies(found: Figures) -> dict[str, Figures]:
    """The figures of each proxy, by its name."""
    return {
        name: sizes
        for name, sizes in found.items()
        if isinstance(sizes, Mapping)
        and any(look(one, "cpu_us_per_request") is not None for one in sizes.values())
        and name != "direct"
    }
