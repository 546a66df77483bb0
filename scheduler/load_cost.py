"""What it costs to load a token from the host's memory, as a share of what it costs to compute one.

A prefix in the host's memory is cheap, but not free: its KV is copied to the device. How cheap
depends on the model, the device and the bus, so an engine measures it:

    share = seconds per loaded token / seconds per computed token

A token of the tier that engines share is first read into the host's memory and then loaded:

    shared share = seconds per read and loaded token / seconds per computed token

All are medians over the latest measurements, weighted by tokens: as many tokens took less time
each as took more. So a few slow copies or passes change little, and old ones are forgotten. Small
measurements are left out, as a start that takes the same time for any size outweighs the tokens.

Until there are enough measurements of its kinds a share is a prior. It stays within bounds: a
load is never free, and is never said to cost more than computing.
"""

from collections import deque

from scheduler.averages import weighted_median

PRIOR, SHARED_PRIOR = 0.1, 0.3
LEAST, MOST = 0.005, 1.0
LEAST_TOKENS = 256
"""A smaller measurement counts for nothing."""
ENOUGH = 3
"""How many measurements of each kind replace the prior."""
LATEST = 32
"""How many measurements of each kind count."""
# A figure changes once the measured one differs by this part of it.
_CHANGE = 0.2
_Kind = deque[tuple[float, int]]


class LoadCost:
    """The shares of one engine.

    share, shared_share: of a computed token. token_s: how long one is computed; 0.0 until it was
        measured.

    They change only when what was measured differs by a fifth, so that they seldom have to be sent,
    and have two digits.
    """

    def __init__(self) -> None:
        self.share, self.shared_share = PRIOR, SHARED_PRIOR
        self.token_s = 0.0
        self._read: _Kind = deque(maxlen=LATEST)
        self._loaded: _Kind = deque(maxlen=LATEST)
        self._computed: _Kind = deque(maxlen=LATEST)

    def read(self, tokens: int, seconds: float) -> None:
        """Counts what was read from the shared tier."""
        self._add(self._read, tokens, seconds)

    def loaded(self, tokens: int, seconds: float) -> None:
        """Counts a load."""
        self._add(self._loaded, tokens, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Counts a forward pass over prompts."""
        self._add(self._computed, tokens, seconds)
        if len(self._computed) >= ENOUGH:
            self.token_s = _changed(self.token_s, weighted_median(self._computed))

    def _add(self, kind: _Kind, tokens: int, seconds: float) -> None:
        if tokens < LEAST_TOKENS or (each_s := seconds / tokens) <= 0:
            return
        kind.append((each_s, tokens))
        self.share = self._share(self.share, self._loaded)
        self.shared_share = self._share(self.shared_share, self._read, self._loaded)

    def _share(self, before: float, *kinds: _Kind) -> float:
        """The share of tokens that go through all of these."""
        if any(len(kind) < ENOUGH for kind in (*kinds, self._computed)):
            return before
        ratio = sum(map(weighted_median, kinds)) / weighted_median(self._computed)
        return _changed(before, min(max(ratio, LEAST), MOST))


def _changed(before: float, measured: float) -> float:
    measured = float(f"{measured:.2g}")
    return measured if abs(measured - before) > _CHANGE * before else before
