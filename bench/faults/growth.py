"""Series of samples, and how fast they grow."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping


class Growth:
    """The samples of each series. warm_up_s: the time whose samples no slope counts."""

    def __init__(self, warm_up_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        """Takes a sample of each series, `at_s` after the start."""
        for name, value in values.items():
            self._series[name].append((at_s, value))

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each series the first value after the warm-up, the last, the largest of all, and
        the slope an hour, by least squares."""
        return {name: self._figures(series) for name, series in sorted(self._series.items())}

    def _figures(self, series: list[tuple[float, float]]) -> dict[str, float]:
        warm = [each for each in series if each[0] >= self._warm_up_s] or series[-1:]
        times, values = zip(*warm, strict=True)
        slope = 0.0
        if len(set(times)) > 1:
            slope = statistics.linear_regression(times, values).slope * 3600
        return {
            "first": values[0],
            "last": values[-1],
            "largest": max(value for _, value in series),
            "slope_per_hour": round(slope, 1),
        }
