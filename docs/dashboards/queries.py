"""Parts of queries that several dashboards share, and the variables that these use.

The balancer's own series have no label `engine`; those from /metrics/engines have.
"""

from __future__ import annotations

from docs.dashboards.panels import Json, Query, variable

OURS = 'job=~"$job",instance=~"$instance",engine=""'
"""A balancer's series."""
WORKER = OURS + ',worker=~"$engine"'
"""A balancer's series about engines."""
ENGINE = 'engine=~"$engine"'
"""An engine's own series."""
GENERATING = OURS + ',path=~"/v1/(messages|chat/completions|completions|responses)|/generate"'

VARIABLES: list[Json] = [
    variable("job", "Job", "sgl_ext_draining", "job"),
    variable("instance", "Node", 'sgl_ext_draining{job=~"$job"}', "instance"),
    variable("engine", "Engine", f"sgl_ext_worker_ready{{{OURS}}}", "worker"),
]


def rate(metric: str, labels: str = OURS, *, by: str = "") -> str:
    """A counter's increase in a second, added up by labels."""
    whole = f"sum by ({by}) " if by else "sum"
    return f"{whole}(rate({metric}{{{labels}}}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """A part of a whole, without a value where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def quantiles(
    metric: str, labels: str = OURS, *, of: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """Quantiles of a histogram, over all its other labels."""
    return tuple((quantile(metric, each, labels), f"p{each * 100:g}") for each in of)


def quantile(metric: str, of: float, labels: str = OURS, *, by: str = "") -> str:
    """A quantile of a histogram, by labels."""
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({of:g}, {rate(f'{metric}_bucket', labels, by=keys)})"
