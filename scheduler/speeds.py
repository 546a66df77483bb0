"""How much slower a worker is than the others, from what requests took there.

A worker of half the speed takes twice as long for each token that it computes and for each step
that it decodes. So what it has to do costs twice as much there:

    weight = seconds a unit of the worker / seconds a unit of the fleet's median worker

Units are tokens to prefill, those ahead of a request and its own, against the time to its first
byte; and decoded tokens, against the time from the first byte to the last. What every request takes
in addition is the same for short and long ones, so a worker's seconds a unit are a slope. Its
latest samples are sorted by units, each of the lower half is paired with one of the upper half, and
the slope is the median over the pairs (Theil, 1950). Those count more that are far apart, and less
that are old. A fifth of all samples may be absurd without another result.

    seconds                  .            lower half   upper half
      |             .   .                 x1 ---------- x4
      |     .  .                          x2 ---------- x5
      +------------------------ units     x3 ---------- x6

A difference within three standard errors of the medians counts as none. The errors grow as samples
grow old, so weights begin at 1 and return to it: a worker that was slow for a while, and therefore
gets few requests, is tried again. Weights are powers of the square root of 2 within bounds, and
change only when what was learned is clearly nearer to another one: equal workers keep the weight 1,
and balancers that learn from different requests agree.
"""

import math
from collections import deque
from typing import NamedTuple

from scheduler.averages import weighted_median

LEAST, MOST = 0.25, 4.0
LATEST = 128
"""How many samples of a worker count."""
SPAN_S = 300.0
"""A sample's weight falls by a factor of e in this time."""
LEAST_PAIRS, LEAST_FRESH = 6, 3.0
"""Fewer pairs say nothing, and neither do pairs that have lost more of their weight."""
DOUBT = 3.0
"""What is within so many standard errors is no difference: on a busy machine, a few answers make
equal workers look different."""
LEAST_PREFILL, LEAST_DECODE = 128, 16
"""Shorter work says little about speed."""
MOST_OUTPUT, MOST_STEP_TOKENS = 4_096, 1_000.0
"""Bounds of an answer's expected length, and of the tokens that are prefilled in a step's time."""
MOST_S = 600.0
REFRESH_S = 1.0
"""Weights change no more often than this, and in a large fleet less often."""
_MOST_EACH_S = 64
"""So many workers' weights are found again in a second: each takes some 5 us."""
# The slope is found again after so many samples.
_EACH = 8
# The standard error of the median of normally distributed values, each so many times the root of
# their number: 1.2533 standard deviations, each 1.4826 median absolute deviations.
_MEDIAN_ERROR = 1.2533 * 1.4826
# What the latest answer adds to the usual length.
_USUAL = 1 / 64
# Steps of a weight are half powers of 2. This far from the present one, it changes.
_CLEAR = 0.75
# Two samples that are nearer to each other say nothing about a slope.
_LEAST_RATIO = 1.25


class Weights(NamedTuple):
    """What a unit of a worker's work costs, 1 on the fleet's median worker."""

    prefill: float = 1.0
    decode: float = 1.0


EVEN = Weights()


_EVEN_STEPS = (0, 0)


class _Sample(NamedTuple):
    units: float
    seconds: float
    at_s: float


class Slope:
    """Seconds a unit, of the latest samples. slope: 0 while too little is known.

    least: a sample of fewer units is none.
    """

    def __init__(self, least: float) -> None:
        self.slope = 0.0
        self._least = least
        self._samples: deque[_Sample] = deque(maxlen=LATEST)
        self._pairs = self._spread = self._estimated_s = 0.0
        self._new = 0

    def add(self, units: float, seconds: float, now_s: float) -> None:
        """Adds a sample, unless it can be none."""
        if not (units >= self._least and math.isfinite(units) and 0 < seconds <= MOST_S):
            return
        self._samples.append(_Sample(units, seconds, now_s))
        self._new += 1
        if self._new >= _EACH:
            self._new = 0
            self._estimate(now_s)

    def pairs(self, now_s: float) -> float:
        """How many pairs the slope rests on, less the older they are."""
        return self._pairs * _freshness(now_s - self._estimated_s)

    def known(self, now_s: float) -> tuple[float, float] | None:
        """The slope and its standard error as a share of it, which grows as the samples grow old;
        None if the slope rests on too few pairs."""
        if not self.slope or (pairs := self.pairs(now_s)) < LEAST_FRESH:
            return None
        return self.slope, self._spread / math.sqrt(pairs)

    def _estimate(self, now_s: float) -> None:
        ordered = sorted(self._samples)
        half = (len(ordered) + 1) // 2
        slopes: list[tuple[float, float]] = []
        pairs = 0.0
        for low, high in zip(ordered, ordered[half:], strict=False):
            if high.units < _LEAST_RATIO * low.units:
                continue
            fresh = _freshness(now_s - min(low.at_s, high.at_s))
            apart = high.units - low.units
            slopes.append(((high.seconds - low.seconds) / apart, fresh * math.sqrt(apart)))
            pairs += fresh
        self.slope = max(weighted_median(slopes), 0.0) if len(slopes) >= LEAST_PAIRS else 0.0
        apart = weighted_median([(abs(slope - self.slope), weight) for slope, weight in slopes])
        self._spread = _MEDIAN_ERROR * apart / self.slope if self.slope else 0.0
        self._pairs, self._estimated_s = pairs, now_s


class Speeds:
    """The weights of a fleet's workers, each known by a number. One that is unknown has EVEN."""

    def __init__(self) -> None:
        self._step_tokens = 0.0
        self._usual_tokens = 0.0
        self._learns = True
        self._slopes: dict[int, tuple[Slope, Slope]] = {}
        self._steps: dict[int, tuple[int, int]] = {}
        self._refreshed_s = -math.inf

    def __len__(self) -> int:
        return len(self._slopes)

    @property
    def learns(self) -> bool:
        """Whether anything is learned. Without that, all weights are EVEN after the next
        refresh."""
        return self._learns

    @learns.setter
    def learns(self, learns: bool) -> None:
        self._learns = learns
        if not learns:
            self._slopes.clear()
            self._refreshed_s = -math.inf

    def prefilled(self, worker: int, tokens: float, seconds: float, now_s: float) -> None:
        """A request's first byte came after so long. tokens: those ahead of it and its own."""
        if self._learns:
            self._of(worker)[0].add(tokens, seconds, now_s)

    def decoded(self, worker: int, tokens: float, seconds: float, now_s: float) -> None:
        """An answer's last byte came so long after its first."""
        if self._learns:
            self._of(worker)[1].add(tokens, seconds, now_s)
            share = _USUAL if self._usual_tokens else 1.0
            self._usual_tokens += share * (min(max(tokens, 0), MOST_OUTPUT) - self._usual_tokens)

    def forget(self, worker: int) -> None:
        """Forgets a worker that is gone, or that may come back as another one."""
        self._slopes.pop(worker, None)
        self._steps.pop(worker, None)

    def weights(self, worker: int) -> Weights:
        """A worker's weights as of the last refresh."""
        steps = self._steps.get(worker)
        return EVEN if steps is None else _weights(steps)

    def answer_tokens(self, expected: int = 0) -> float:
        """How many tokens the usual worker prefills in the time in which it decodes an answer of
        the `expected` length, or of the usual length for 0. It is 0 while that is unknown, and
        while all workers are equally fast."""
        if not self._steps:
            return 0.0
        return self._step_tokens * (min(expected, MOST_OUTPUT) or self._usual_tokens)

    def refresh(self, now_s: float) -> list[int]:
        """Brings the weights up to date, if that is due. Returns the workers whose weights have
        changed."""
        if now_s - self._refreshed_s < REFRESH_S * max(len(self._slopes) / _MOST_EACH_S, 1.0):
            return []
        self._refreshed_s = now_s
        before = self._steps
        (token_s, prefill), (step_s, decode) = self._learned(0, now_s), self._learned(1, now_s)
        self._step_tokens = min(step_s / token_s, MOST_STEP_TOKENS) if token_s else 0.0
        self._steps = {
            worker: steps
            for worker in self._slopes
            if (steps := (prefill.get(worker, 0), decode.get(worker, 0))) != _EVEN_STEPS
        }
        workers = before.keys() | self._steps.keys()
        return [worker for worker in workers if before.get(worker) != self._steps.get(worker)]

    def _of(self, worker: int) -> tuple[Slope, Slope]:
        if worker not in self._slopes:
            self._slopes[worker] = Slope(LEAST_PREFILL), Slope(LEAST_DECODE)
        return self._slopes[worker]

    def _learned(self, kind: int, now_s: float) -> tuple[float, dict[int, int]]:
        """The seconds of the usual worker, 0 if they are unknown, and the weights of the workers
        that are known as half powers of 2."""
        known = {
            worker: found
            for worker, slopes in self._slopes.items()
            if (found := slopes[kind].known(now_s)) is not None
        }
        if len(known) < 2:
            return 0.0, {}
        usual, usual_error = sorted(known.values())[(len(known) - 1) // 2]
        weights: dict[int, int] = {}
        for worker, (slope, error) in known.items():
            apart = 2 * math.log2(slope / usual)
            doubt = DOUBT * 2 / math.log(2) * math.hypot(error, usual_error)
            learned = apart if abs(apart) > doubt else 0.0
            learned = min(max(learned, 2 * math.log2(LEAST)), 2 * math.log2(MOST))
            step = self._steps.get(worker, _EVEN_STEPS)[kind]
            weights[worker] = round(learned) if abs(learned - step) > _CLEAR else step
        return usual, weights


def _weights(steps: tuple[int, int]) -> Weights:
    return Weights(2 ** (steps[0] / 2), 2 ** (steps[1] / 2))


def _freshness(age_s: float) -> float:
    return math.exp(-max(age_s, 0.0) / SPAN_S)
