"""Which worker takes a request: the one where it costs least, in tokens of prefill.

    cost = prefill_weight * (pending + (1 + DELAY * share) * (uncached + loaded)
                             [+ RECENT * recent])
           + decode_weight * DECODE_TOKENS * decoding
           + (decode_weight - 1) * ANSWER * answer [+ SESSION_SHARE * sessions]

pending   tokens that the worker still has to prefill for other requests: the wait
uncached  tokens of this prompt that the worker holds in no tier and must compute. They delay
          this request, and those that come to the worker meanwhile
loaded    what it costs to load the tokens that it has in slower tiers: of one that is computed, a
          token costs `load_share` from its host and `shared_share` from the shared tier
share     how many of those to expect: the worker's sessions with this one, against the mean of all
          workers with this one, 1 at most. A worker without sessions delays few, so a prefix that
          all sessions share spreads early, and one that some sessions share stays on few workers
decoding  requests that generate there: each makes a step of the engine a little longer
answer    what decoding its answer takes on the usual worker, in tokens of prefill. Only what it
          takes longer on this worker counts, and less than prefill: it delays no other request
recent    tokens prefilled there in the last seconds: an engine that is short of memory evicts
          what it needs next, so it computes all the time long before it queues
sessions  tokens of the conversations that live there and will come back. They take memory, which a
          slow worker has no less of
weights   1, or what was learned of a worker that is slower or faster than others (`speeds`)

The terms in brackets count only for the first request of a session, because it decides where all
later turns go. It goes where few sessions live, even if a shared prefix must be computed there
once more: so a hot prefix spreads. A known session stays where its conversation is cached until
waiting there, by the weight of the worker, costs more than moving, which is LEAVE times the tokens
that moving would compute again. If the worker has evicted the conversation, the session is placed
as a new one. A token of a slower tier counts as held, less the cost of loading it. A worker that
has just come back counts as slower than it is, less so as it warms up.

Ties go to the highest rendezvous score of the prefix (Thaler and Ravishankar, 1998), so that
balancers that see the same loads choose the same worker without a message.

A standby is a second worker that computes a session's prompt ahead, before its own worker is too
busy. A session leaves its worker when that worker is full, or when waiting there costs more than
computing its prompt elsewhere (`scheduler.capacity`). Its client then waits for the whole prompt.
An idle worker can compute the prompt earlier: most of the next turn's prompt is this turn's.

A worker is strained when three quarters of the requests that it can run at once are in flight
there, or when its pending work takes half as long as computing this prompt: at the whole of that
the next turn would move. One standby is enough, so none is chosen while another worker holds
the prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec
import xxhash

DELAY = 2.0
# Where a worker reports none. Dynamo weighs tokens of a shared cache at 0.3 to 0.7.
LOAD_SHARE = 0.1
SHARED_SHARE = 0.3
DECODE_TOKENS = 256
ANSWER = 0.5
RECENT = 0.5
RECENT_S = 10.0
# Recent tokens far below this number are no sign of load.
RECENT_FLOOR = 4_000
SESSION_SHARE = 0.05
LEAVE = 2.0
# A session is lost when its worker holds less than this share of what only that session had.
LOST_SHARE = 0.5
_LEAST_WARMTH = 0.05


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be placed.

    prefix: breaks ties; equal for requests that share a beginning.
    home: the worker of its session, None for a new session.
    last_tokens: the length of the session's last prompt, 0 if unknown.
    answer_tokens: so many tokens of prefill take the usual worker as long as decoding its answer.
    """

    prompt_tokens: int
    prefix: int
    home: str | None = None
    last_tokens: int = 0
    answer_tokens: float = 0.0


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """A worker as a request sees it.

    held_tokens: tokens of this request's prompt that it holds on the device, or is about to.
    host_tokens, shared_tokens: those after them that it can load from its host, and those after
        both that it can load from the shared tier of its machine.
    load_share, shared_share: what such a token costs, as a share of one that is computed.
    warmth: 1, or less while it warms up after coming back.
    prefill_weight, decode_weight: what its work costs, 1 on the usual worker.
    """

    name: str
    held_tokens: int = 0
    pending_tokens: int = 0
    decoding: int = 0
    recent_tokens: float = 0.0
    session_tokens: int = 0
    warmth: float = 1.0
    host_tokens: int = 0
    shared_tokens: int = 0
    load_share: float = LOAD_SHARE
    shared_share: float = SHARED_SHARE
    prefill_weight: float = 1.0
    decode_weight: float = 1.0

    @property
    def wait(self) -> float:
        """What it still has to prefill, by its weight."""
        return self.prefill_weight * self.pending_tokens

    @property
    def loaded(self) -> float:
        """The cost of loading what slower tiers have."""
        return self.load_share * self.host_tokens + self.shared_share * self.shared_tokens

    @property
    def saved(self) -> float:
        """The tokens that it needs not compute, less the cost of loading some of them."""
        if not (self.host_tokens or self.shared_tokens):
            return self.held_tokens
        return self.held_tokens + self.host_tokens + self.shared_tokens - self.loaded


class Score(NamedTuple):
    """A worker's cost, and its terms in tokens. `answer` is what decoding takes longer than on the
    usual worker; the others are without the worker's weights."""

    name: str
    cost: float
    pending: int
    uncached: int
    decoding: int
    recent: float
    sessions: float
    loaded: float = 0.0
    answer: float = 0.0


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The chosen worker, and the reason.

    "home": the session's worker. "moved": waiting at the session's worker would cost more.
    "lost": the session's worker has evicted it. "new": a session's first request.
    """

    worker: str
    reason: str


def stays(
    request: PlacementRequest, home: WorkerView, most_saved: float = 0, least_wait: float = 0
) -> str:
    """The reason for placing a known session: "home" if it stays on its worker.

    "moved": waiting there costs more than moving. "lost": its cache there is gone.
    most_saved: the most that another worker saves (see `WorkerView.saved`).
    least_wait: the least `WorkerView.wait` of another worker, `inf` without others. If 0 says
        "home" or "lost", so does any other number: only for "moved" need it be known.
    """
    saved = home.saved - most_saved
    if saved < LOST_SHARE * (request.last_tokens - most_saved):
        return "lost"
    longer = home.wait - least_wait
    return "home" if longer <= LEAVE * max(saved, 0) else "moved"


def place(
    request: PlacementRequest,
    workers: Sequence[WorkerView],
    mean_sessions: float | None = None,
    *,
    moves: bool = False,
) -> Placement | None:
    """Chooses one of the workers; None if there are none.

    mean_sessions: the mean of all workers' session tokens, if `workers` are only some of them.
    moves: whether the session would stay on its worker if that had capacity; `workers` are others.
    """
    if not workers:
        return None
    reason = "moved" if moves else "new"
    home = next((view for view in workers if view.name == request.home), None)
    if home is not None:
        others = [view for view in workers if view is not home]
        most_saved = max([view.saved for view in others], default=0)
        least_wait = min([view.wait for view in others], default=inf)
        reason = stays(request, home, most_saved, least_wait)
        if reason == "home":
            return Placement(home.name, reason)
    is_new = reason != "moved"
    mean = _mean_sessions(workers) if mean_sessions is None else mean_sessions
    # Whole tokens: balancers that add the same numbers in another order must see the same ties.
    costs = [round(_cost(request, view, mean, is_new=is_new)) for view in workers]
    least = min(costs)
    ties = [view.name for view, cost in zip(workers, costs, strict=True) if cost == least]
    chosen = chosen_of(request.prefix, ties)
    return Placement(chosen, "home" if chosen == request.home else reason)


def score_all(
    request: PlacementRequest,
    workers: Sequence[WorkerView],
    mean_sessions: float | None = None,
    *,
    is_new: bool,
) -> list[Score]:
    """The request's cost on each of the workers. `is_new`: with the terms of a new session.
    mean_sessions: as in `place`."""
    mean = _mean_sessions(workers) if mean_sessions is None else mean_sessions
    return [_score(request, view, mean, is_new=is_new) for view in workers]


def standing_cost(view: WorkerView, *, is_new: bool) -> float:
    """What a request without a prompt would cost there, if the worker were warm."""
    recent = sessions = 0.0
    if is_new:
        recent, sessions = _recent_cost(view), SESSION_SHARE * view.session_tokens
    cost = view.prefill_weight * (view.pending_tokens + recent)
    return cost + view.decode_weight * DECODE_TOKENS * view.decoding + sessions


def _recent_cost(view: WorkerView) -> float:
    return RECENT * view.recent_tokens**2 / (view.recent_tokens + RECENT_FLOOR)


def _mean_sessions(workers: Sequence[WorkerView]) -> float:
    return sum(view.session_tokens for view in workers) / len(workers) if workers else 0.0


def _score(request: PlacementRequest, view: WorkerView, mean: float, *, is_new: bool) -> Score:
    return Score(
        view.name,
        _cost(request, view, mean, is_new=is_new),
        view.pending_tokens,
        _uncached(request, view),
        DECODE_TOKENS * view.decoding,
        _recent_cost(view) if is_new else 0.0,
        SESSION_SHARE * view.session_tokens if is_new else 0.0,
        view.loaded,
        _answer_cost(request, view),
    )


def _uncached(request: PlacementRequest, view: WorkerView) -> int:
    held_tokens = view.held_tokens + view.host_tokens + view.shared_tokens
    return max(request.prompt_tokens - held_tokens, 0)


def _cost(request: PlacementRequest, view: WorkerView, mean: float, *, is_new: bool) -> float:
    missing = _uncached(request, view) + view.loaded
    share, recent, sessions = 1.0, 0.0, 0.0
    if is_new:
        own = max(request.prompt_tokens, 1)
        share = min((view.session_tokens + own) / (mean + own), 1.0)
        recent, sessions = _recent_cost(view), SESSION_SHARE * view.session_tokens
    tokens = view.pending_tokens + (1 + DELAY * share) * missing + recent
    cost = view.prefill_weight * tokens + view.decode_weight * DECODE_TOKENS * view.decoding
    cost += sessions + _answer_cost(request, view)
    if view.warmth < 1.0:
        cost = (cost + 1) / max(view.warmth, _LEAST_WARMTH)
    return cost


def _answer_cost(request: PlacementRequest, view: WorkerView) -> float:
    return (view.decode_weight - 1) * ANSWER * request.answer_tokens


def chosen_of(prefix: int, names: Sequence[str]) -> str:
    """The worker, of at least one, with the highest rendezvous score for a prefix."""
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda name: (rendezvous(prefix, name), name))


def rendezvous(prefix: int, worker: str) -> int:
    """The fixed score of a worker for a prefix, equal in every process."""
    return xxhash.xxh3_64_intdigest(worker.encode(), seed=prefix & 0xFFFFFFFFFFFFFFFF)


FULL = 0.75
LONG_WAIT = 0.5
# Computing fewer tokens than this is not worth a second request.
LEAST_TOKENS = 1024


def is_strained(prompt_tokens: int, pending_tokens: int, running: float | None) -> bool:
    """Whether a session's worker may be unable to take the next turn soon.

    pending_tokens: tokens that it still has to prefill for other requests.
    running: the share of its request slots in use, 1 if it queues, None if unknown.
    """
    is_full = running is not None and running >= FULL
    return is_full or pending_tokens >= LONG_WAIT * prompt_tokens


def choose_standby(
    prompt_tokens: int, prefix: int, held_tokens: Mapping[str, int], idle: Collection[str]
) -> str | None:
    """The standby for a session whose worker is strained; None if another worker holds the
    prompt or none is idle.

    It is the idle worker that holds most of the prompt; ties are broken as in placement.
    held_tokens: how much of the prompt each other worker holds or is about to hold.
    idle: those of them where nothing runs.
    """
    if any(prompt_tokens - held < LEAST_TOKENS for held in held_tokens.values()):
        return None
    return max(idle, key=lambda w: (held_tokens[w], rendezvous(prefix, w), w), default=None)
