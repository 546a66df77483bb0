"""The cached tokens of each engine's recent prompts, from counters that there are anyway."""

from collections import deque
from collections.abc import Mapping, Sequence

from sgl_ext.balancer.metrics.instruments import Labels

INTERVAL_S = 10.0
SAMPLES = 30

Pair = tuple[int, int]


class HitRates:
    """Samples two counters by engine, so that it knows their increase in the last five minutes.

    cached, prompt: the counters of reported cached tokens, and of these prompts' tokens.
    """

    def __init__(self, cached: Mapping[Labels, int], prompt: Mapping[Labels, int]) -> None:
        self._cached = cached
        self._prompt = prompt
        self._samples: dict[str, deque[Pair]] = {}
        self._sampled_s = float("-inf")

    def sample(self, now_s: float, engines: Sequence[str]) -> None:
        """Call it periodically with all engines; it forgets the others."""
        if now_s - self._sampled_s < INTERVAL_S:
            return
        self._sampled_s = now_s
        nothing: deque[Pair] = deque([(0, 0)], maxlen=SAMPLES)
        self._samples = {name: self._samples.get(name) or nothing.copy() for name in engines}
        for name, samples in self._samples.items():
            samples.append(self._totals(name))

    def recent(self, engine: str) -> Pair:
        """Cached tokens, and tokens of the prompts, since the oldest sample."""
        samples = self._samples.get(engine)
        before = samples[0] if samples else (0, 0)
        now = self._totals(engine)
        if now < before:  # the engine left, and another came that has its name
            before = (0, 0)
        return now[0] - before[0], now[1] - before[1]

    def _totals(self, engine: str) -> Pair:
        return self._cached.get((engine,), 0), self._prompt.get((engine,), 0)
