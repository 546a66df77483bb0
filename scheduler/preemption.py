"""Whose memory a more important request takes when there is none left for it.

A request that runs may be preempted for one whose priority is at least `threshold` higher.
What it did is lost and has to be done again. That is thrash if it happens to the same one over
and over, so who was preempted before is safe for `grace_s` after it was admitted again, and
who was preempted `most_times` runs to its end.

Of all sets of victims that free enough, these are preferred, in this order:

    1. the fewest of the highest priority among them, then of the next lower one, and so on
       down: nobody is preempted while any number of less important ones would do
    2. the least work lost

The first is met exactly. From the highest priority down, a class gives as few as would free
enough if all below it were preempted as well, and to count these, those that free most are
taken. It follows that no victim can be left out, as then a class would have given fewer; and
that where one victim is enough, there is one.

The second is a knapsack problem for more than one victim. Those that free most are a set to
begin with. In it each victim, who loses most first, is exchanged for the one of its class that
loses least of those with whom enough is freed. One victim is thus the one that loses least of
all that free enough. Of several, none could be exchanged for another of its class to lose less;
to exchange two at once might.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Running(NamedTuple):
    """A request that runs.

    priority: the step that it had reached when it was admitted.
    frees_tokens: the memory that comes free if it is preempted.
    lost_tokens: the work to do again then: its answer so far, and what of its prompt will
    not be cached.
    """

    priority: int
    frees_tokens: int
    lost_tokens: int
    admitted_s: float
    times_preempted: int = 0


def victims(
    running: Sequence[Running],
    needed_tokens: int,
    priority: int,
    now_s: float,
    *,
    threshold: int,
    grace_s: float,
    most_times: int = 3,
    slots: int = 0,
) -> list[int]:
    """The positions of those to preempt, ascending, for a request that has reached `priority`.

    Together they free `needed_tokens`, and are at least `slots`. Empty if nothing is needed,
    or if it cannot be had: nobody is preempted in vain. Which of two equals is preempted,
    and nothing else, depends on their positions.
    """
    classes: dict[int, list[int]] = {}
    for position, one in enumerate(running):
        is_safe = one.times_preempted > 0 and now_s - one.admitted_s < grace_s
        if (
            one.priority <= priority - threshold
            and one.times_preempted < most_times
            and not is_safe
        ):
            classes.setdefault(one.priority, []).append(position)
    usable = [position for positions in classes.values() for position in positions]
    spare_tokens = sum(running[position].frees_tokens for position in usable) - needed_tokens
    spare_victims = len(usable) - slots
    if spare_tokens < 0 or spare_victims < 0:
        return []
    # All are chosen; the highest class first, each leaves out as many as it can.
    chosen: list[int] = []
    left_out: dict[int, list[int]] = {}
    for level in sorted(classes, reverse=True):
        by_size = sorted(classes[level], key=lambda position: _by_size(running, position))
        spared = 0
        for position in by_size:
            frees_tokens = running[position].frees_tokens
            if frees_tokens > spare_tokens or spare_victims < 1:
                break
            spare_tokens -= frees_tokens
            spare_victims -= 1
            spared += 1
        left_out[level] = by_size[:spared]
        chosen += by_size[spared:]
    return sorted(_exchanged(running, chosen, left_out, spare_tokens))


def _exchanged(
    running: Sequence[Running],
    chosen: list[int],
    left_out: dict[int, list[int]],
    spare_tokens: int,
) -> list[int]:
    """As many of each class as were chosen, but such that no exchange of one loses less.

    Once through is enough. Those left out free no more than those chosen, so what is to spare
    only shrinks, and what could not be exchanged before cannot be after. Who loses most is
    exchanged first, so nobody later would rather have one that was given up.
    """
    exchanged = []
    for others in left_out.values():
        others.sort(key=lambda position: _by_loss(running, position))
    for position in sorted(chosen, key=lambda position: _by_loss(running, position), reverse=True):
        one = running[position]
        others = left_out[one.priority]
        for index, instead in enumerate(others):
            other = running[instead]
            is_less = other.lost_tokens < one.lost_tokens
            if is_less and one.frees_tokens - other.frees_tokens <= spare_tokens:
                spare_tokens -= one.frees_tokens - other.frees_tokens
                position = others.pop(index)
                break
        exchanged.append(position)
    return exchanged


def _by_size(running: Sequence[Running], position: int) -> tuple[float, ...]:
    """Who is left out first: who frees least, then who loses most, then who runs longest."""
    one = running[position]
    return one.frees_tokens, -one.lost_tokens, one.admitted_s, -one.times_preempted, -position


def _by_loss(running: Sequence[Running], position: int) -> tuple[float, ...]:
    """Who is preempted first: who loses least, then who frees most, then who came last."""
    one = running[position]
    return one.lost_tokens, -one.frees_tokens, -one.admitted_s, one.times_preempted, position


class PreemptionHistory:
    """Keeps one from preempting another twice in a row.

    Of each victim is known who preempted it last, of at most `limit` victims: beyond it the
    one that was not preempted for longest is forgotten first.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._last: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def allows(self, preemptor: str, victim: str) -> bool:
        """Whether it was not the same one that preempted the victim last."""
        return self._last.get(victim) != preemptor

    def record(self, preemptor: str, victim: str) -> None:
        """The victim was preempted."""
        self._last[victim] = preemptor
        self._last.move_to_end(victim)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)
