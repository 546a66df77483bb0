"""The metrics that a node exports, with their labels, as its code declares them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from docs.metrics_page import Row, added_rows, balancer_rows, engine_rows

PROMETHEUS = {"up": frozenset[str]()}
"""What Prometheus itself adds."""


def declared() -> dict[str, frozenset[str]]:
    """Every series of the balancer and of the extension in engines, as /metrics and
    /metrics/engines have them."""
    known: dict[str, frozenset[str]] = dict(PROMETHEUS)
    for rows, added in ((balancer_rows(), ()), (engine_rows(), ("engine",)), (added_rows(), ())):
        for row in rows:
            for name, labels in _series(row):
                known[name] = known.get(name, frozenset()) | labels | set(added)
    return known


def _series(row: Row) -> list[tuple[str, frozenset[str]]]:
    labels = frozenset(row.labels)
    if row.kind != "histogram":
        return [(row.name, labels)]
    ends = {"_bucket": labels | {"le"}, "_sum": labels, "_count": labels}
    return [(f"{row.name}{end}", has) for end, has in ends.items()]


def sglang_source() -> str:
    """The code in which SGLang names its metrics."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "observability"
    return "".join(path.read_text() for path in folder.glob("*.py"))
