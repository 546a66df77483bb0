"""The median of values that count differently much."""

from collections.abc import Iterable


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The least value that, with all below it, has half of the weight; 0 without values.

    weighted: each value and its weight.
    """
    ascending = sorted(weighted)
    half, so_far = sum(weight for _, weight in ascending) / 2, 0.0
    for value, weight in ascending:
        so_far += weight
        if so_far >= half:
            return value
    return 0.0
