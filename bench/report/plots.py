"""Draws charts as SVG, one for a light page and one for a dark page.

The same chart gives the same bytes with the same matplotlib. Texts are paths, so that no font is
needed. Series differ in colour and in marker; the colours are apart for colour-blind readers too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report.charts import Chart, Point
from bench.report.labels import is_ours


@dataclass(frozen=True)
class Theme:
    """Colours of a page. ours: of our own series; others: of all other series, in turn."""

    text: str
    faint: str
    ours: tuple[str, ...]
    others: tuple[str, ...]


# Okabe and Ito's colours, those that stand out on each background.
THEMES = {
    "light": Theme(
        "#1f2328", "#d0d7de", ("#0072b2", "#56b4e9"), ("#d55e00", "#7a7a7a", "#009e73", "#cc79a7")
    ),
    "dark": Theme(
        "#e6edf3", "#3d444d", ("#56b4e9", "#1f8fd1"), ("#e69f00", "#b0b0b0", "#2bbf92", "#d88fb8")
    ),
}
_MARKERS = "osD^vP"
_INCHES_WIDE, _INCHES_HIGH, _INCHES_A_ROW = 7.2, 3.6, 0.36
_LEGEND_COLUMNS = 3


def image_name(chart: str, theme: str) -> str:
    """The file of a chart."""
    return f"benchmarks-{chart}-{theme}.svg"


def draw(charts: Mapping[str, Chart], folder: Path) -> None:
    """Writes two files for each chart, and deletes those of charts that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("benchmarks-*.svg"):
        old.unlink()
    for chart in charts.values():
        for name, theme in THEMES.items():
            draw_one(chart, theme, folder / image_name(chart.name, name))


def draw_one(chart: Chart, theme: Theme, path: Path) -> None:
    """Writes one file."""
    import matplotlib

    matplotlib.use("agg")
    with matplotlib.rc_context(_settings(chart, theme)):
        from matplotlib import pyplot

        rows = len({point.x for points in chart.series.values() for point in points})
        high = 1.6 + _INCHES_A_ROW * rows if chart.kind == "dots" else _INCHES_HIGH
        figure, axes = pyplot.subplots(figsize=(_INCHES_WIDE, high), layout="constrained")
        axes.set_title(chart.title, loc="left", fontsize=11)
        (_lines if chart.kind == "lines" else _dots)(axes, chart, theme)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower left", ncols=min(len(chart.series), _LEGEND_COLUMNS))
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _settings(chart: Chart, theme: Theme) -> Any:
    colours = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        "svg.fonttype": "path",
        "svg.hashsalt": chart.name,
        "font.size": 9.5,
        "font.family": "DejaVu Sans",  # matplotlib brings it
        "axes.edgecolor": theme.faint,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        **dict.fromkeys(colours, theme.text),
    }


def _lines(axes: Any, chart: Chart, theme: Theme) -> None:
    styles = _styles(list(chart.series), theme)
    for (name, points), (colour, marker) in zip(chart.series.items(), styles, strict=True):
        x = [point.x for point in points]
        y = [point.y for point in points]
        axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.6, label=name)
        if all(point.low is not None for point in points):
            low, high = [point.low for point in points], [point.high for point in points]
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    places = sorted({point.x for points in chart.series.values() for point in points})
    if chart.is_log_x:
        axes.set_xscale("log")
        _tick_near(axes, places)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    _scale(axes, "y", chart)
    axes.set_xlabel(chart.x_axis)
    axes.set_ylabel(chart.value_axis)
    axes.grid(axis="y")


def _tick_near(axes: Any, places: list[Any]) -> None:
    """Ticks at the values themselves, of those that differ by little only the first."""
    apart = [x for n, x in enumerate(places) if n == 0 or x > 1.2 * places[n - 1]]
    axes.set_xticks(apart, [_in_short(x) for x in apart])
    axes.minorticks_off()


def _in_short(x: float) -> str:
    if x >= 950_000:
        return f"{x / 1e6:.2g}M"
    return f"{x / 1000:.0f}K" if x >= 2000 else f"{x:.0f}"


def _dots(axes: Any, chart: Chart, theme: Theme) -> None:
    rows = list(dict.fromkeys(str(p.x) for points in chart.series.values() for p in points))
    place = {name: len(rows) - 1 - n for n, name in enumerate(rows)}
    for (name, points), marker in zip(chart.series.items(), _MARKERS, strict=False):
        first = True
        for point in points:
            colour = theme.ours[0] if is_ours(str(point.x)) else theme.others[0]
            y = place[str(point.x)]
            if point.low is not None and point.high is not None:
                axes.plot([point.low, point.high], [y, y], color=colour, linewidth=1.4, alpha=0.6)
            axes.plot(point.y, y, marker=marker, color=colour, markersize=6, linestyle="none")
            _value(axes, point, y)
            if first:  # the legend is about markers: their colour is that of the row
                axes.plot([], [], marker=marker, color=theme.text, linestyle="none", label=name)
                first = False
    axes.set_yticks(list(place.values()), list(place))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    _scale(axes, "x", chart)
    axes.set_xlabel(chart.value_axis)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _value(axes: Any, point: Point, y: float) -> None:
    text = f"{point.y:,.0f}" if point.y >= 100 else f"{point.y:.3g}"
    place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": 7.5}
    axes.annotate(text, (point.y, y), **place)


def _scale(axes: Any, axis: str, chart: Chart) -> None:
    if chart.is_log:
        from matplotlib.ticker import FuncFormatter, LogLocator

        getattr(axes, f"set_{axis}scale")("log")
        ticks = getattr(axes, f"{axis}axis")
        ticks.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        ticks.set_minor_locator(LogLocator(base=10, subs=()))
    else:
        getattr(axes, f"set_{axis}lim")(0, None)


def _styles(names: list[str], theme: Theme) -> Iterator[tuple[str, str]]:
    ours = others = 0
    for number, name in enumerate(names):
        marker = _MARKERS[number % len(_MARKERS)]
        if is_ours(name):
            yield theme.ours[ours % len(theme.ours)], marker
            ours += 1
        else:
            yield theme.others[others % len(theme.others)], marker
            others += 1
