"""Whose memory is taken first when an engine needs some.

A token in memory saves its computation if its agent comes back, and until then it takes the place
of others. So what it is worth is the chance that the agent comes back, for each second that it
must be held until then. Memory is taken from the agent of least worth, whatever was used last:

    an agent that has ended                       0
    one that waits for a person, or is overdue    little
    one whose tool ends soon                      much
    one whose request waits in the queue          infinitely much

Among equals the one that was used least recently goes first. So nothing is reserved: what an agent
keeps is what no other one makes better use of.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Literal, NamedTuple

from scheduler.programs.programs import Outlook

PAUSE_S = 0.5
"""No agent comes back sooner than that; so short differences between tools decide nothing."""

WANTED_FROM = 0.5

Policy = Literal["off", "ended", "expected"]
"""off: recency alone decides. ended: what ended agents leave goes first. expected: the above."""


class Held(NamedTuple):
    """An agent with memory. used_s: when it was last used."""

    name: str
    worth: float
    used_s: float


def worth(outlook: Outlook | None, policy: Policy) -> float:
    """What holding a token of an agent is worth, relative to others'. outlook: None if the agent
    is not known, which is like one that may have ended."""
    if outlook is None or outlook.has_ended:
        return 0.0
    if policy == "ended":
        return 1.0
    if not outlook.soon_s:
        return inf
    return outlook.chance / (outlook.soon_s + PAUSE_S)


def is_wanted(outlook: Outlook | None, policy: Policy) -> bool:
    """Whether what only this agent reads is more likely to be read again than not. outlook: None
    if the agent is not known, of which nothing is assumed."""
    if outlook is None or policy == "off":
        return True
    return not outlook.has_ended if policy == "ended" else outlook.chance >= WANTED_FROM


def first_to_go(
    held: Iterable[Held], wanted_tokens: int, own_tokens: Callable[[str], int]
) -> frozenset[str]:
    """The agents from which so many tokens are taken, as few as needed.

    own_tokens: how many tokens of an agent no other one shares.
    """
    going: list[str] = []
    for one in sorted(held, key=lambda one: (one.worth, one.used_s, one.name)):
        if wanted_tokens <= 0:
            break
        going.append(one.name)
        wanted_tokens -= own_tokens(one.name)
    return frozenset(going)
