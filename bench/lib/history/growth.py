"""How fast figures grow with the length of a history."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from bench.lib.script import require

MOST = 1.3
"""A stage may grow as n to this power: linear work with caches that run out, not quadratic."""
_SHORTEST_MS = 5.0
_LEAST_TOKENS = 50_000
"""Shorter histories fit the processor's caches, and take mostly constant time."""


def exponents(by_size: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """For each stage the exponent of its growth from the second largest size to the largest, by
    milliseconds. Stages that take less than 5 ms at the largest size have none."""
    sizes = sorted(by_size)[-2:]
    if len(sizes) < 2:
        return {}
    small, large = sizes
    return {
        stage: round(_exponent(by_size[small].get(stage, 0.0), ms, large / small), 2)
        for stage, ms in by_size[large].items()
        if ms >= _SHORTEST_MS
    }


def require_near_linear(kind: str, by_size: Mapping[int, Mapping[str, float]]) -> None:
    """Raises InvariantBroken if a stage grows faster than n^MOST between two neighbouring sizes, in
    tokens, of at least 50K."""
    for pair in pairwise(sorted(size for size in by_size if size >= _LEAST_TOKENS)):
        for stage, power in exponents({size: by_size[size] for size in pair}).items():
            require(power <= MOST, f"{kind}: no stage is quadratic", stage=stage, power=power)


def _exponent(small_ms: float, large_ms: float, factor: float) -> float:
    # What is short is mostly a constant, and noise.
    return math.log(large_ms / max(small_ms, _SHORTEST_MS / factor)) / math.log(factor)
