"""What each plot shows, as data: read from the figures of one step, drawn by `plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bench.report.labels import OURS, PIN_LABELS, label
from bench.report.tables import extremes, look, middle

Figures = Mapping[str, Any]
DECISIONS = {
    f"{OURS}, whole decision": ("ours_us", "decision_p50"),
    f"{OURS}, lookup": ("ours_us", "lookup_p50"),
    f"{label('dynamo')}, lookup": ("dynamo_us", "lookup_p50"),
    "Dynamo, whole decision": ("dynamo_us", "decision_p50"),
}
"""Where the times of decisions are, by what they are of."""


class Point(NamedTuple):
    """x is a number, or a category. low, high: the extremes of the rounds, if they are known."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """A plot. lines: y over x; dots: a category in each row, its value to the right.

    series: points by the label of their series. A chart without points is not drawn.
    """

    name: str
    title: str
    kind: Literal["lines", "dots"]
    series: Mapping[str, Sequence[Point]]
    value_axis: str
    x_axis: str = ""
    is_log: bool = False
    is_log_x: bool = False

    @property
    def alternative(self) -> str:
        """The text for who cannot see the plot."""
        return f"{self.title}: {', '.join(self.series)}"


def charts(figures_of: Mapping[str, Figures]) -> dict[str, Chart]:
    """All charts that have points, by name. figures_of: of the steps that ended well."""
    drawn = [make(figures_of.get(step, {})) for step, make in _CHARTS]
    return {chart.name: chart for chart in drawn if any(chart.series.values())}


def _point(x: float | str, value: Any) -> Iterator[Point]:
    y = middle(value)
    if y is not None:
        yield Point(x, y, *(extremes(value) or (None, None)))


def turns(found: Figures, path: str = "/v1/messages") -> dict[int, Figures]:
    """The figures of warm turns through a protocol, by the planned size of the prompt."""
    sizes = look(found, path) or {}
    return {int(size): of for size, of in sizes.items() if size.isdigit()}


def _long_histories(found: Figures) -> Chart:
    series: dict[str, list[Point]] = {}
    for one in (look(found, "sizes") or {}).values():
        for kind in ("cold", "warm"):
            for arm in ("stock", "ours"):
                tokens = middle(look(one, arm, "prompt_tokens"))
                name = f"{label(arm)}, {kind}"
                points = [] if tokens is None else _point(tokens, look(one, arm, kind, "ttft_ms"))
                series.setdefault(name, []).extend(points)
    return Chart(
        "ttft-of-long-histories",
        "TTFT of long histories, without the cost of attention",
        "lines",
        series,
        "TTFT, ms",
        "tokens of the prompt",
        is_log=True,
        is_log_x=True,
    )


def _ttft_by_length(found: Figures) -> Chart:
    series: dict[str, list[Point]] = {}
    for of_size in turns(found).values():
        for name, arm in of_size.items():
            tokens = middle(look(arm, "prompt_tokens"))
            if tokens is not None:
                series.setdefault(label(name), []).extend(_point(tokens, look(arm, "ttft_ms")))
    return Chart(
        "ttft-by-length",
        "TTFT of a turn whose prefix is cached",
        "lines",
        series,
        "TTFT, ms",
        "tokens of the prompt",
        is_log=True,
        is_log_x=True,
    )


def _cached_by_turn(found: Figures) -> Chart:
    numbers = look(found, "by_turn", "turn") or []
    series = {
        label(name, PIN_LABELS): [
            point
            for number, share in zip(numbers, shares, strict=False)
            for point in _point(number, 100 * share)
        ]
        for name, shares in (look(found, "by_turn", "cached_share") or {}).items()
    }
    return Chart(
        "cached-by-turn",
        "Cached share of a session's history, with a flood between turns",
        "lines",
        series,
        "cached, %",
        "turn of the session",
    )


def _under_pressure(found: Figures) -> Chart:
    return Chart(
        "ttft-under-pressure",
        "TTFT of interactive requests beside a batch larger than memory",
        "dots",
        {
            head: [
                point
                for name, arm in (look(found, "memory", "arms") or {}).items()
                for point in _point(label(name), look(arm, "interactive", key))
            ]
            for head, key in (("p50", "ttft_p50_ms"), ("p99", "ttft_p99_ms"))
        },
        "TTFT, ms",
        is_log=True,
    )


def _routers(found: Figures) -> Chart:
    arms = routers(found)
    return Chart(
        "routers",
        "TTFT by router, sessions of agent teams on four simulated engines",
        "dots",
        {
            head: [
                point
                for name, one in arms.items()
                for point in _point(label(name), look(one, f"ttft_{head}_ms"))
            ]
            for head in ("p50", "p99")
        },
        "TTFT, ms",
        is_log=True,
    )


def routers(found: Figures) -> dict[str, Figures]:
    """The figures of each router, by its name."""
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, Mapping) and look(one, "ttft_p50_ms") is not None
    }


def proxies(found: Figures) -> dict[str, Figures]:
    """The figures of each proxy, by its name."""
    return {
        name: sizes
        for name, sizes in found.items()
        if isinstance(sizes, Mapping)
        and any(look(one, "cpu_us_per_request") is not None for one in sizes.values())
        and name != "direct"
    }


def size_of(key: str) -> str:
    """`200kb` as a person writes it."""
    return key.replace("kb", " KB").replace("mb", " MB")


def _proxy_cost(found: Figures) -> Chart:
    series: dict[str, list[Point]] = {}
    for name, sizes in proxies(found).items():
        for size, one in sizes.items():
            points = _point(label(name), look(one, "cpu_us_per_request"))
            series.setdefault(f"body of {size_of(size)}", []).extend(points)
    return Chart(
        "proxy-cost",
        "CPU time of a proxy for each request",
        "dots",
        series,
        "microseconds of CPU",
        is_log=True,
    )


def _decision_time(found: Figures) -> Chart:
    series: dict[str, list[Point]] = {}
    for workers, cell in (look(found, "by_workers") or {}).items():
        for head, place in DECISIONS.items():
            points = _point(int(workers), look(cell, *place))
            series.setdefault(head, []).extend(points)
    series = {head: points for head, points in series.items() if points}
    return Chart(
        "decision-time",
        "Time of a routing decision",
        "lines",
        series,
        "microseconds",
        "engines",
        is_log=True,
        is_log_x=True,
    )


_CHARTS: Sequence[tuple[str, Callable[[Figures], Chart]]] = (
    ("warm_turn", _ttft_by_length),
    ("long_history", _long_histories),
    ("pin_flood", _cached_by_turn),
    ("priority", _under_pressure),
    ("routing", _routers),
    ("proxy", _proxy_cost),
    ("index", _decision_time),
)
