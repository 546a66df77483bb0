"""Which worker takes a request: the one where it costs least, in tokens of prefill.

    cost = pending + COMPUTE * uncached + DECODE_TOKENS * decoding
           [+ RECENT * recent + SESSION_SHARE * sessions]

pending   tokens that others still have to prefill there: the wait for one's turn
uncached  tokens of this prompt that the worker does not hold: what it will compute.
          They count COMPUTE times, for they delay this request and all that come after
decoding  requests that generate there: each makes a step of the engine a little longer
recent    tokens computed there in the last seconds: a worker whose memory is short
          evicts what it needs next and computes all the time, long before it queues
sessions  tokens of the conversations that live there and will come back

A new session's first request decides where all its later turns go, so it alone
counts what is in brackets, and goes where little lives even if a prefix that
everybody shares must be computed there once more: so a hot prefix spreads. A known
session stays where its conversation is cached, until waiting there costs more than
moving would, LEAVE times the tokens that it would compute again. Once the worker has
evicted the conversation there is nothing to stay for, and it is placed as a new one.
A worker that has just come back counts as slower than it is, less so as it warms up.

Ties go to the highest rendezvous score of the prefix (Thaler and Ravishankar, 1998),
so that balancers that see the same loads agree without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

COMPUTE = 3.0
DECODE_TOKENS = 256
RECENT = 0.5
RECENT_S = 10.0
# Far below so many tokens a worker is idle, and what it computed recently tells nothing.
RECENT_FLOOR = 4_000
SESSION_SHARE = 0.05
LEAVE = 1.0
# A conversation of which its worker holds less than this share of what was its own is lost.
LOST_SHARE = 0.5
_LEAST_WARMTH = 0.05


class PlacementRequest(NamedTuple):
    """A request to be placed.

    prefix: what ties are broken by, equal for requests that share a beginning.
    home: the worker its session is on, None for a new session.
    last_tokens: how long the session's last prompt was, 0 if that is not known.
    """

    prompt_tokens: int
    prefix: int
    home: str | None = None
    last_tokens: int = 0


class WorkerView(NamedTuple):
    """What is known of a worker when a request is placed.

    held_tokens: how much of this very prompt it holds, or is about to hold.
    warmth: 1, or less while it has only just come back.
    """

    name: str
    held_tokens: int = 0
    pending_tokens: int = 0
    decoding: int = 0
    recent_tokens: float = 0.0
    session_tokens: int = 0
    warmth: float = 1.0


class OtherWorkers(NamedTuple):
    """All workers but a session's own: the most that one holds of the prompt, and the least
    that is pending at one."""

    held_tokens: int
    pending_tokens: int


class Score(NamedTuple):
    """A worker's cost and what it is made of, all in tokens."""

    name: str
    cost: float
    pending: int
    uncached: int
    decoding: int
    recent: float
    sessions: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker chosen, and why.

    "home": its session is there. "moved": waiting there would cost more. "lost": what was
    cached there is gone. "new": a session's first request.
    """

    worker: str
    reason: str


def stays(request: PlacementRequest, home: WorkerView, others: OtherWorkers) -> str:
    """Whether a known session stays on its worker: "home", or why it is placed again.

    "moved": waiting there costs more than moving would. "lost": nothing is left to stay for.
    """
    saved = home.held_tokens - others.held_tokens
    if saved < LOST_SHARE * (request.last_tokens - others.held_tokens):
        return "lost"
    ahead = home.pending_tokens - others.pending_tokens
    return "home" if ahead <= LEAVE * max(saved, 0) else "moved"


def place(request: PlacementRequest, workers: Sequence[WorkerView]) -> Placement | None:
    """Chooses among the workers that may be sent a request; None if there are none."""
    if not workers:
        return None
    reason = "new"
    home = next((view for view in workers if view.name == request.home), None)
    if home is not None:
        rest = [view for view in workers if view is not home]
        most = max((view.held_tokens for view in rest), default=0)
        least = min((view.pending_tokens for view in rest), default=home.pending_tokens)
        reason = stays(request, home, OtherWorkers(most, least))
        if reason == "home":
            return Placement(home.name, reason)
    scores = score(request, workers, is_new=reason != "moved")
    chosen = _cheapest(scores, request.prefix)
    return Placement(chosen, "home" if chosen == request.home else reason)


def score(request: PlacementRequest, workers: Sequence[WorkerView], *, is_new: bool) -> list[Score]:
    """What the request would cost on each worker."""
    return [_score(request.prompt_tokens, view, is_new) for view in workers]


def _score(prompt_tokens: int, view: WorkerView, is_new: bool) -> Score:
    uncached = max(prompt_tokens - view.held_tokens, 0)
    decoding = DECODE_TOKENS * view.decoding
    recent = _recent(view.recent_tokens) if is_new else 0.0
    sessions = SESSION_SHARE * view.session_tokens if is_new else 0.0
    cost = view.pending_tokens + COMPUTE * uncached + decoding + recent + sessions
    if view.warmth < 1.0:
        cost = (cost + 1) / max(view.warmth, _LEAST_WARMTH)
    return Score(view.name, cost, view.pending_tokens, uncached, decoding, recent, sessions)


def _recent(tokens: float) -> float:
    return RECENT * tokens * tokens / (tokens + RECENT_FLOOR)


def _cheapest(scores: Sequence[Score], prefix: int) -> str:
    least = min(score.cost for score in scores)
    names = [score.name for score in scores if score.cost == least]
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda name: (rendezvous(prefix, name), name))


def rendezvous(prefix: int, worker: str) -> int:
    """The fixed score of a worker for a prefix: whoever asks gets the same."""
    return xxhash.xxh3_64_intdigest(worker.encode(), seed=prefix & 0xFFFFFFFFFFFFFFFF)
