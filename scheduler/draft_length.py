"""How many drafted tokens a step of decoding verifies.

A step computes `width` tokens for each request of its batch: the one that is due, and up to
`width - 1` drafted ones. A wider step takes longer, and a drafted token is worth something only if
the model would have written it. So a step is as wide as gives most tokens a second:

    tokens    what the drafts are expected to give, by how long their matches are and by what such
              matches, and the request's own drafts, gave lately
    seconds   what steps of this batch's size and width took lately

Where no width gives more than one token a step does, nothing is drafted, and the search for drafts
rests: for a few steps first, for longer each time that it did not pay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LONGEST_REST = 256
"""The most steps for which a batch of one size does not look for drafts."""

_FIRST_REST = 4
_MUST_GAIN = 1.03
"""What a wider step must give, as a multiple of one token's step: the times are noisy."""

_MEASURED_AGAIN = 256
"""A time that so many steps of its size have not renewed is measured again."""

_GUESSED_COST = 0.02
"""Of each further token, as a share of a step, until it is measured."""

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MATCHES = (1, 2, 4, 8, 16)
_PRIORS = (0.3, 0.45, 0.6, 0.75, 0.85)
_PRIOR_WEIGHT = 8.0
_KEPT = 0.98
_KEPT_OF_REQUEST = 0.8


@dataclass(slots=True)
class Acceptance:
    """How many of the tokens that were drafted were right, and how often one was wrong, lately."""

    right: float = 0.0
    wrong: float = 0.0

    def add(self, right: int, is_wrong: bool, kept: float) -> None:
        self.right = self.right * kept + right
        self.wrong = self.wrong * kept + is_wrong


class Offer(NamedTuple):
    """What was found for a request. length: of its draft. chance: that a drafted token is right."""

    length: int
    chance: float

    def expected(self, width: int) -> float:
        """The tokens that a step of this width gives: the due one, and the drafted ones before the
        first that is wrong."""
        length = min(self.length, width - 1)
        return 1.0 + self.chance * (1 - self.chance**length) / (1 - self.chance)


class _Size:
    """What is known of batches of one size."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.age: dict[int, int] = {}
        self.rest, self.resting = 0, 0

    def measured(self, width: int, seconds: float) -> None:
        known = self.seconds.get(width)
        if known is not None:
            # A pause of the process is no cost of the width.
            seconds = known + 0.2 * (min(seconds, 3 * known) - known)
        self.seconds[width] = seconds
        for each in self.age:
            self.age[each] += 1
        self.age[width] = 0

    def guess(self, width: int) -> float:
        """The time of a width, from that of the nearest ones that were measured."""
        if width in self.seconds:
            return self.seconds[width]
        known = sorted(self.seconds)
        below = [each for each in known if each < width]
        above = [each for each in known if each > width]
        one = below[-1]  # the width of one token is always known
        if above:
            share = (width - one) / (above[0] - one)
            return self.seconds[one] * (1 - share) + self.seconds[above[0]] * share
        slope = self.seconds[1] * _GUESSED_COST
        if len(below) > 1:
            rise = self.seconds[one] - self.seconds[below[-2]]
            slope = max(slope, rise / (one - below[-2]))
        return self.seconds[one] + slope * (width - one)


class DraftLengths:
    """What steps took and what drafts gave, in one scheduler.

    widths: those that a step can have, ascending, from 1.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self._sizes: dict[int, _Size] = {}
        self._matches = [
            Acceptance(prior * _PRIOR_WEIGHT / (1 - prior), _PRIOR_WEIGHT) for prior in _PRIORS
        ]

    @property
    def most(self) -> int:
        """The longest draft that a step can verify."""
        return self.widths[-1] - 1

    def is_resting(self, batch: int) -> bool:
        """Whether this step looks for no drafts, as they did not pay. Counts the step."""
        size = self._size(batch)
        if not size.resting:
            return False
        size.resting -= 1
        return True

    def offer(self, length: int, matched: int, request: Acceptance) -> Offer:
        """What a draft of this length, after a match of that length, is worth."""
        alike = self._matches[_kind(matched)]
        right, wrong = alike.right, alike.wrong
        # The request's own drafts count as much as all others once there are a few.
        weight = (right + wrong) / _PRIOR_WEIGHT
        right, wrong = right + weight * request.right, wrong + weight * request.wrong
        return Offer(length, min(right / (right + wrong), 0.98))

    def choose(self, batch: int, offers: Sequence[Offer]) -> int:
        """The width of this step; 1: nothing is drafted."""
        longest = max((offer.length for offer in offers), default=0)
        size = self._size(batch)
        if not longest or not size.seconds.get(1):
            return 1
        if size.age.get(1, 0) >= _MEASURED_AGAIN:
            return 1
        others = batch - len(offers)
        plain = batch / size.seconds[1]
        best, best_rate = 1, plain * _MUST_GAIN
        for width in self.widths[1:]:
            rate = (others + sum(offer.expected(width) for offer in offers)) / size.guess(width)
            if rate > best_rate:
                best, best_rate = width, rate
            # A width is tried once the next narrower one was: a step far too wide costs many.
            if width > longest or width not in size.seconds:
                break
        if best > 1:
            size.rest = 0
        else:
            size.rest = min(max(2 * size.rest, _FIRST_REST), LONGEST_REST)
            size.resting = size.rest
            if size.rest == LONGEST_REST:
                # The times may be old, or of a bad moment.
                size.seconds = {1: size.seconds[1]}
                size.rest = LONGEST_REST // 2
        return best

    def took(self, batch: int, width: int, seconds: float) -> None:
        """A step of this batch and width took so long."""
        self._size(batch).measured(width, seconds)

    def verified(self, matched: int, sent: int, right: int, request: Acceptance) -> None:
        """Of a draft after a match of this length, `sent` tokens were verified and `right` kept."""
        is_wrong = right < sent
        self._matches[_kind(matched)].add(right, is_wrong, _KEPT)
        request.add(right, is_wrong, _KEPT_OF_REQUEST)

    def _size(self, batch: int) -> _Size:
        size = next((size for size in _SIZES if size >= batch), _SIZES[-1])
        return self._sizes.setdefault(size, _Size())


def _kind(matched: int) -> int:
    return sum(1 for most in _MATCHES[1:] if matched >= most)
