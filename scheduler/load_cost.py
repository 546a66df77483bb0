"""What it costs to load a token from the host's memory, as a share of what it costs to compute one.

A prefix in the host's memory is cheap, but not free: its KV is copied to the device. How cheap
depends on the model, the device and the bus, so an engine measures it:

    share = seconds per loaded token / seconds per computed token

Both are medians over the latest measurements, weighted by tokens: as many tokens took less time
each as took more. So a few slow copies or passes change little, and old ones are forgotten. Small
measurements are left out, as a start that takes the same time for any size outweighs the tokens.

Until there are enough measurements of both kinds the share is a prior. It stays within bounds: a
load is never free, and is never said to cost more than computing.
"""

from collections import deque
from collections.abc import Iterable

PRIOR = 0.1
LEAST, MOST = 0.005, 1.0
LEAST_TOKENS = 256
"""A smaller measurement counts for nothing."""
ENOUGH = 3
"""How many measurements of each kind replace the prior."""
LATEST = 32
"""How many measurements of each kind count."""
# The share changes once the measured one differs by this part of it.
_CHANGE = 0.2


class LoadCost:
    """The share of one engine.

    share: changes only when what was measured differs by a fifth, so that it seldom has to be
        sent; it has two digits.
    """

    def __init__(self) -> None:
        self.share = PRIOR
        self._loaded: deque[tuple[float, int]] = deque(maxlen=LATEST)
        self._computed: deque[tuple[float, int]] = deque(maxlen=LATEST)

    def loaded(self, tokens: int, seconds: float) -> None:
        """Counts a load."""
        self._add(self._loaded, tokens, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Counts a forward pass over prompts."""
        self._add(self._computed, tokens, seconds)

    def _add(self, kind: deque[tuple[float, int]], tokens: int, seconds: float) -> None:
        if tokens < LEAST_TOKENS or (each_s := seconds / tokens) <= 0:
            return
        kind.append((each_s, tokens))
        if min(len(self._loaded), len(self._computed)) < ENOUGH:
            return
        ratio = _median(self._loaded) / _median(self._computed)
        measured = float(f"{min(max(ratio, LEAST), MOST):.2g}")
        if abs(measured - self.share) > _CHANGE * self.share:
            self.share = measured


def _median(weighted: Iterable[tuple[float, int]]) -> float:
    """The least value that, with all below it, has half of the weight."""
    ascending = sorted(weighted)
    half, so_far = sum(weight for _, weight in ascending) / 2, 0
    for value, weight in ascending:
        so_far += weight
        if so_far >= half:
            return value
    return 0.0
