"""Which running requests and cached prefixes give way to others when memory has run out.

A running request may be preempted for one whose priority is at least `threshold` higher. Its
work is lost and must be done again. To preempt the same request repeatedly is thrash. So a request
that was preempted is safe for `grace_s` after it was admitted again, and one that was preempted
`most_times` runs to its end.

Of all sets of victims that free enough, the preferred one has, in this order:

    1. the fewest victims of the highest priority, then of the next lower one, and so on:
       no request is preempted where any number of less important ones is enough
    2. the least work lost

Rule 1 is met exactly. From the highest priority down, each class gives up the fewest requests
that free enough if all lower classes are preempted as well, counting the largest first. It
follows that every victim is needed, since otherwise its class would have given fewer, and that
there is only one victim where one is enough.

Rule 2 is a knapsack problem for more than one victim. The search begins with the largest requests.
Each victim, the one that loses most first, is exchanged for the request of its class that loses
least, if the set still frees enough. A single victim is thus the best one. In a set of several, no
single exchange within a class loses less, though exchanging two at once might.

Eviction takes the lowest priority first, and the least recently used among equals. A node of the
tree keeps the highest priority that any request gave it, because that request may still share
it. So the low priority is only for what no later request will read:

    the new part of a prompt   if its client asked not to keep it, or ended its session with it
    an output                  of such a request, or one that begins with thinking, which the
                               chat template omits when the output is sent back

All else is equal: recency alone decides between system prompts, tool results and turns.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from cachetools import FIFOCache


class Running(NamedTuple):
    """A running request.

    priority: the step that it had reached when it was admitted.
    frees_tokens: the memory that preempting it frees.
    lost_tokens: the work that preempting it loses: its output so far, and the part of its
    prompt that will not be cached.
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
    """The ascending positions of the requests to preempt for one that has reached `priority`.

    Together they free `needed_tokens`, and are at least `slots` many. Empty if nothing is needed
    or if no set frees enough: no request is preempted in vain. Positions only decide between
    requests that are equal otherwise.
    """
    usable = [
        position
        for position, one in enumerate(running)
        if one.priority <= priority - threshold
        and one.times_preempted < most_times
        and (not one.times_preempted or now_s - one.admitted_s >= grace_s)
    ]
    spare_tokens = sum(running[position].frees_tokens for position in usable) - needed_tokens
    spare_victims = len(usable) - slots
    if spare_tokens < 0 or spare_victims < 0:
        return []
    # Begin with all; from the highest class down, leave out as many as possible.
    chosen: list[int] = []
    left_out: defaultdict[int, list[int]] = defaultdict(list)
    usable.sort(key=lambda position: _by_size(running, position))
    usable.sort(key=lambda position: running[position].priority, reverse=True)
    for position in usable:
        one = running[position]
        if one.frees_tokens <= spare_tokens and spare_victims > 0:
            spare_tokens -= one.frees_tokens
            spare_victims -= 1
            left_out[one.priority].append(position)
        else:
            chosen.append(position)
    return sorted(_exchanged(running, chosen, left_out, spare_tokens))


def _exchanged(
    running: Sequence[Running],
    chosen: list[int],
    left_out: defaultdict[int, list[int]],
    spare_tokens: int,
) -> list[int]:
    """Exchanges victims within their class until no single exchange loses less work.

    One pass is enough. The requests left out free no more than those chosen, so the spare tokens
    only shrink, and an exchange that was impossible stays impossible. The victim that loses most
    is exchanged first, so no later victim could use a request that was given up.
    """
    exchanged = []
    for others in left_out.values():
        others.sort(key=lambda position: _by_loss(running, position))
    for position in sorted(chosen, key=lambda position: _by_loss(running, position), reverse=True):
        one = running[position]
        others = left_out[one.priority]
        for other in others:
            more_tokens = one.frees_tokens - running[other].frees_tokens
            if running[other].lost_tokens < one.lost_tokens and more_tokens <= spare_tokens:
                spare_tokens -= more_tokens
                others.remove(other)
                position = other
                break
        exchanged.append(position)
    return exchanged


def _by_size(running: Sequence[Running], position: int) -> tuple[float, ...]:
    """The order of leaving out in a class: frees least, then loses most, then runs longest."""
    one = running[position]
    return one.frees_tokens, -one.lost_tokens, one.admitted_s, -one.times_preempted, -position


def _by_loss(running: Sequence[Running], position: int) -> tuple[float, ...]:
    """The order of preempting: loses least, then frees most, then admitted last."""
    one = running[position]
    return one.lost_tokens, -one.frees_tokens, -one.admitted_s, one.times_preempted, position


class PreemptionHistory:
    """The last preemptor of each victim, so that no request preempts another twice in a row.

    At most `limit` victims; beyond it the one whose preemption is oldest is forgotten.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._last: FIFOCache[str, str] = FIFOCache(limit)

    def allows(self, preemptor: str, victim: str) -> bool:
        """Whether another request was the last to preempt the victim."""
        return self._last.get(victim) != preemptor

    def record(self, preemptor: str, victim: str) -> None:
        """Records a preemption."""
        self._last[victim] = preemptor


EVICT_FIRST = 0
EVICT_NORMALLY = 1


class EvictionPriority(NamedTuple):
    """The priorities of what a request adds to the cache."""

    prompt: int = EVICT_NORMALLY
    answer: int = EVICT_NORMALLY


def eviction_priority(*, is_kept: bool, is_last: bool, is_answer_kept: bool) -> EvictionPriority:
    """The priorities of a request's prompt and output.

    is_kept: the client did not ask to drop the prompt.
    is_last: the client ended the session with this request.
    is_answer_kept: the next turn's prompt will contain this output as it was generated.
    """
    prompt = EVICT_NORMALLY if is_kept and not is_last else EVICT_FIRST
    return EvictionPriority(prompt, prompt if is_answer_kept else EVICT_FIRST)
