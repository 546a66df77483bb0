"""Which other worker is warmed for a session before its own is too busy for it.

A session leaves its worker when that is full, or when to wait there costs more than to compute
its prompt again elsewhere (`scheduler.placement`, `scheduler.capacity`). Then somebody waits for
the whole prompt. A worker with nothing to do can compute it earlier, as it is known since the turn
before: most of it is this turn's.

A worker is strained when three in four of those that it may run at once are there, or when what
waits there would take half as long as to compute this prompt: at the whole of it the next turn
would move. One spare is enough, so nobody is warmed while another holds the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.placement import rendezvous

FULL = 0.75
LONG_WAIT = 0.5
# What is computed sooner than this is no loss worth a second request.
LEAST_TOKENS = 1024


class WorkerLoad(NamedTuple):
    """A worker as a session's request sees it.

    held_tokens: of the request's prompt, there or about to be.
    pending_tokens: what it still has to prefill for others.
    running: how much of what it may run at once runs there, 1 if it queues; None if not known.
    is_idle: nothing runs there.
    """

    name: str
    held_tokens: int
    pending_tokens: int
    running: float | None
    is_idle: bool


def is_strained(prompt_tokens: int, home: WorkerLoad) -> bool:
    """Whether the session's next turn may not be taken, or not soon, where this one is."""
    if home.running is not None and home.running >= FULL:
        return True
    return home.pending_tokens >= LONG_WAIT * prompt_tokens


def choose_standby(
    prompt_tokens: int, prefix: int, home: WorkerLoad, others: Sequence[WorkerLoad]
) -> str | None:
    """The worker to be warmed for a session on `home`; None if it need not be, or none can.

    Of the idle ones, the one that holds most of the prompt; a tie goes as in placement.
    """
    if not is_strained(prompt_tokens, home):
        return None
    if any(prompt_tokens - other.held_tokens < LEAST_TOKENS for other in others):
        return None
    idle = [other for other in others if other.is_idle]
    if not idle:
        return None
    return max(idle, key=lambda o: (o.held_tokens, rendezvous(prefix, o.name), o.name)).name
