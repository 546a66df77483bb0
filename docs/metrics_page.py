"""Writes the lists of docs/reference/metrics.md from the code: `python -m docs.metrics_page`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from sgl_ext.balancer.admin import engine_metrics
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.models import ModelPool, Models
from sgl_ext.balancer.routing.workers import Workers, WorkerSet, WorkerSources
from sgl_ext.engine.core.counters import COUNTERS, GAUGES

PAGE = Path(__file__).with_name("reference") / "metrics.md"
_BEGIN, _END = "<!-- Made by `python -m docs.metrics_page`: {} -->", "<!-- The end of that. -->"
_COMMON = "process_"
"""Metrics of a process that every Prometheus client has; the page names them together."""


class Row(NamedTuple):
    """One metric. name: as it is in a query, without a histogram's endings."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def balancer_rows() -> list[Row]:
    """What a balancer exports, in the order of its page."""
    metrics = Metrics()
    workers = Workers(metrics)
    WorkerSources((), workers, metrics)
    nothing: Any = SimpleNamespace(prefixes=SimpleNamespace())
    parts = WorkerSet(), *[nothing] * 4
    Models(workers, metrics, lambda name: ModelPool(name, *parts))
    collectors = metrics.registry._names_to_collectors
    rows = []
    for family in metrics.registry.collect():
        owner = family if hasattr(family, "_labelnames") else collectors[family.name]
        labels = (*getattr(owner, "_labelnames", ()), *_sample_labels(family))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(Row(name, family.type, tuple(dict.fromkeys(labels)), family.documentation))
    return rows


def _sample_labels(family: Metric) -> Iterator[str]:
    for sample in family.samples:
        yield from (name for name in sample.labels if name != "le")


def engine_rows() -> list[Row]:
    """What the extension adds to the page of an engine."""
    counters = [
        Row(f"sgl_ext_{name}_total", "counter", tuple(labels), text)
        for name, (text, *labels) in COUNTERS.items()
    ]
    gauges = [
        Row(f"sgl_ext_{name}", "gauge", tuple(labels), text)
        for name, (text, *labels) in GAUGES.items()
    ]
    return counters + gauges


def added_rows() -> list[Row]:
    """What /metrics/engines adds to the engines' own pages."""
    up, restarts = engine_metrics.UP, engine_metrics.RESTARTS
    crashes = engine_metrics.CRASHES
    return [
        Row(up.decode(), "gauge", ("engine",), engine_metrics.UP_HELP.decode()),
        Row(restarts.decode(), "counter", ("child",), engine_metrics.RESTARTS_HELP.decode()),
        Row(crashes.decode(), "counter", ("child",), engine_metrics.CRASHES_HELP.decode()),
    ]


def page(text: str) -> str:
    """The page with its lists replaced by what the code says now."""
    lists = {"balancer": balancer_rows(), "engine": engine_rows(), "added": added_rows()}
    for name, rows in lists.items():
        begin = _BEGIN.format(name)
        made = f"{begin}\n\n{_lists(rows)}\n{_END}"
        text, found = re.subn(
            rf"{re.escape(begin)}.*?{re.escape(_END)}", lambda _, made=made: made, text, flags=re.S
        )
        assert found == 1, f"{PAGE.name} has one place for the list of {name}"
    return text


def _lists(rows: list[Row]) -> str:
    """A list for each type, since a query depends on it."""
    lists = []
    for kind in dict.fromkeys(row.kind for row in rows):
        lines = [f"**{kind.capitalize()}s**", ""]
        for row in rows:
            if row.kind == kind and not row.name.startswith(_COMMON):
                labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
                lines.append(f"- `{row.name}{labels}`: {row.text}")
        lists.append("\n".join(lines) + "\n")
    return "\n".join(lists)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
