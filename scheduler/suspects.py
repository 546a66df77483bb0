"""Which request ended an engine, and whether those that were there are sent again.

    unknown --> seen --> suspected --> on trial --> cleared
       |                    ^             |
       +--------------------+             +--> refused, for REFUSED_S

An engine that ends loses all of its requests. One of them may be the cause.

- A request that came within SUSPECT_S of the engine's end is suspected.
- Any other request is seen. It is suspected at the second end that it is there for.
- A request that is not suspected is sent again at once.

A suspect is sent again alone: its trial. One trial runs at a time, and a suspect waits for SETTLE_S
first. The trial may end an engine, so it begins only while another engine is there. A suspect waits
for another engine for LAST_WAIT_S at most. It does not wait if the engine that it was at is found
ready: then only a connection broke, and a request that is convicted for that is pardoned.

If the engine ends during the trial, the request on trial is the cause. It is refused, and the other
requests there are not blamed. The request is cleared by its answer. It is also cleared by a sign of
life that the engine gives after the time that the earlier engine lasted.

A client may leave before the engine ends, and send the same again. So a case belongs to a request's
fingerprint, and not to one request. A request that left an engine without an answer is suspected
like the requests that were still there.

A hang is an end, too. An engine that is silent ended with its last sign of life. A request that was
sent later is no cause.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum

SUSPECT_S = 1.0
REFUSED_S = 300.0
SETTLE_S = 0.25
LAST_WAIT_S = 120.0
# A trial lasts twice as long as the longest time that an engine lasted, within these bounds.
_TRIAL_S = 1.0, 60.0
# After that an engine that shows no life would have been found, so the request is cleared.
MOST_TRIAL_S = 120.0
# What is lost on an engine for so long after a trial ended it is not blamed, and for so long an
# engine that ended counts as none that is there.
ENDED_S = 10.0
LIMIT = 4096
# Requests that left one engine without an answer.
MOST_LEFT = 64
# Refused requests that are sent to peers.
MOST_TOLD = 64
# A peer says each second that a trial of its own is under way.
PEER_SILENT_S = 3.0


class Verdict(Enum):
    """What becomes of a request."""

    AGAIN = "it may be sent"
    ALONE = "it may be sent when its trial begins"
    REFUSED = "it ended two engines"


AGAIN, ALONE, REFUSED = Verdict


@dataclass(slots=True)
class _Case:
    """What is known of a fingerprint.

    changed_s: when that changed. worker, ended_s: the last engine that ended with it, and when.
    is_ended, has_lived: whether that engine was found to have ended, or to be ready.
    longest_s: the longest time that an engine lasted with it.
    is_accused: it was lost on trial, and whether its engine ended is not known yet.
    """

    changed_s: float
    worker: str = ""
    ended_s: float = float("-inf")
    is_ended: bool = False
    has_lived: bool = False
    ends: int = 0
    longest_s: float = 0.0
    is_suspected: bool = False
    is_accused: bool = False
    refused_until_s: float = float("-inf")
    is_ours: bool = False


@dataclass(slots=True)
class _Trial:
    """worker: None until the request is sent."""

    request: str
    lasts_s: float
    worker: str | None = None
    sent_s: float = 0.0


@dataclass(eq=False)
class Suspects:
    """The cases of one balancer process. Requests are named by their fingerprints, engines by their
    ids. Times are seconds of one monotonic clock.

    cases: what is known of each request. Without any, no request has to be looked up.
    judged: called with "suspected", "cleared" or "convicted" when a request becomes that.
    """

    judged: Callable[[str], None] = lambda result: None
    cases: OrderedDict[str, _Case] = field(default_factory=OrderedDict, init=False)
    _trial: _Trial | None = field(default=None, init=False)
    _ended_s: dict[str, float] = field(default_factory=dict, init=False)
    _gone_s: dict[str, float] = field(default_factory=dict, init=False)
    _explained_s: dict[str, float] = field(default_factory=dict, init=False)
    _peers_try_s: dict[Hashable, float] = field(default_factory=dict, init=False)
    _left: dict[str, deque[tuple[str, float]]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.cases)

    def standing(self, request: str, now_s: float) -> Verdict:
        """Whether a request may be sent now."""
        case = self.cases.get(request)
        if case is None or now_s - case.changed_s >= REFUSED_S:
            return AGAIN
        if case.refused_until_s > now_s:
            return REFUSED
        return ALONE if case.is_suspected else AGAIN

    # What happens to engines.

    def lost(
        self, request: str, worker: str, sent_s: float, stopped_s: float, now_s: float
    ) -> Verdict:
        """A request was at an engine that ended before it answered.

        stopped_s: when the engine last showed life.
        """
        self._ended_s[worker] = now_s
        trial = self._trial
        if trial is not None and trial.worker is not None:
            if trial.request == request:
                self._convict(trial, worker, now_s)
                return REFUSED
            elif trial.worker == worker:
                return AGAIN
        if (standing := self.standing(request, now_s)) is REFUSED:
            return REFUSED
        if now_s < self._explained_s.get(worker, now_s) or sent_s > stopped_s + SUSPECT_S:
            return AGAIN if standing is AGAIN else ALONE
        return self._blame(request, worker, sent_s, stopped_s, now_s)

    def left(self, request: str, worker: str, sent_s: float) -> None:
        """A client left an engine before the answer was complete."""
        found = self._left.setdefault(worker, deque(maxlen=MOST_LEFT))
        found.append((request, sent_s))

    def ended(self, worker: str, stopped_s: float, now_s: float) -> None:
        """An engine ended, whether a request was lost there or not."""
        self._ended_s[worker] = self._gone_s[worker] = now_s
        for case in self.cases.values():
            if case.worker == worker and now_s - case.ended_s < ENDED_S:
                case.is_ended = True
                if case.is_accused:
                    self._refuse(case, now_s)
        trial = self._trial
        if trial is not None and trial.worker == worker:
            self._convict(trial, worker, now_s)
        left = self._left.pop(worker, ())
        if now_s < self._explained_s.get(worker, now_s):
            return
        for request, sent_s in left:
            if abs(stopped_s - sent_s) <= SUSPECT_S:
                self._blame(request, worker, sent_s, stopped_s, now_s)

    def lives(self, worker: str, since_s: float) -> None:
        """An engine was found ready by a probe that began at `since_s`."""
        if self._ended_s.get(worker, since_s) >= since_s:
            return
        del self._ended_s[worker]
        for name, case in tuple(self.cases.items()):
            if case.worker == worker and case.ended_s < since_s and not case.is_ended:
                case.has_lived = True
                if case.is_accused:
                    del self.cases[name]

    def has_ended(self, worker: str, now_s: float) -> bool:
        """Whether an engine ended just now, though it may not be known everywhere."""
        return now_s - self._ended_s.get(worker, float("-inf")) < ENDED_S

    def _blame(
        self, request: str, worker: str, sent_s: float, stopped_s: float, now_s: float
    ) -> Verdict:
        case = self._case(request, now_s)
        if case.refused_until_s > now_s:
            return REFUSED
        if case.worker != worker or now_s - case.ended_s >= ENDED_S:  # it may be there twice
            case.ends += 1
        self._note_end(case, worker, now_s)
        lasted_s = max(stopped_s - sent_s, 0.0)
        case.longest_s = max(case.longest_s, lasted_s)
        if not case.is_suspected and (lasted_s <= SUSPECT_S or case.ends >= 2):
            case.is_suspected = True
            self.judged("suspected")
        return ALONE if case.is_suspected else AGAIN

    def _note_end(self, case: _Case, worker: str, now_s: float) -> None:
        case.worker, case.ended_s = worker, now_s
        case.is_ended, case.has_lived = worker in self._gone_s, False

    def _case(self, request: str, now_s: float) -> _Case:
        case = self.cases.get(request)
        if case is None or now_s - case.changed_s >= REFUSED_S:
            case = self.cases[request] = _Case(now_s)
            if len(self.cases) > LIMIT:
                self.cases.popitem(last=False)
        case.changed_s = now_s
        self.cases.move_to_end(request)
        return case

    def _convict(self, trial: _Trial, worker: str, now_s: float) -> None:
        self._trial = None
        case = self._case(trial.request, now_s)
        self._note_end(case, worker, now_s)
        self._explained_s[worker] = now_s + ENDED_S
        case.is_suspected = case.is_accused = True
        if case.is_ended:
            self._refuse(case, now_s)

    def _refuse(self, case: _Case, now_s: float) -> None:
        case.refused_until_s, case.is_ours, case.is_accused = now_s + REFUSED_S, True, False
        self.judged("convicted")

    def is_caught(self, request: str, now_s: float) -> bool:
        """Whether a request was lost on trial, so that it is not sent again."""
        case = self.cases.get(request)
        return self.standing(request, now_s) is REFUSED or (case is not None and case.is_accused)

    # Trials.

    def may_begin(self, request: str, waited_s: float, others: int) -> bool:
        """Whether a suspect's trial may begin.

        waited_s: how long it has waited. others: engines that would be left if one ended.
        """
        if self._trial is not None or self._peers_try_s or waited_s < SETTLE_S:
            return False
        case = self.cases.get(request)
        if case is not None and case.is_accused:
            return False
        has_lived = case is not None and case.has_lived
        return others > 0 or has_lived or waited_s >= LAST_WAIT_S

    def begin(self, request: str) -> None:
        """A suspect's trial begins. It will be sent, or `gives_up`."""
        assert self._trial is None, "one trial at a time"
        case = self.cases.get(request)
        shortest_s, longest_s = _TRIAL_S
        lasted_s = 0.0 if case is None else case.longest_s
        self._trial = _Trial(request, min(max(2 * lasted_s, shortest_s), longest_s))

    def sent(self, request: str, worker: str, now_s: float) -> None:
        """A request was sent, on trial or not."""
        trial = self._trial
        if trial is not None and trial.request == request:
            trial.worker, trial.sent_s = worker, now_s

    def gives_up(self, request: str) -> None:
        """A request is not sent after all, or not yet. It stays what it is."""
        trial = self._trial
        if trial is not None and trial.request == request and trial.worker is None:
            self._trial = None

    def answered(self, request: str) -> None:
        """An engine has answered a request, so it ends none."""
        trial, case = self._trial, self.cases.get(request)
        if trial is not None and trial.request == request:
            self._trial = None
        if case is not None and case.refused_until_s == float("-inf"):
            del self.cases[request]
            if case.is_suspected:
                self.judged("cleared")

    def pass_time(self, now_s: float, heard_s: Callable[[str], float | None]) -> None:
        """Clears the suspect whose trial has lasted for long enough, and forgets old cases. Call it
        periodically.

        heard_s: when an engine last showed life; None if it never says.
        """
        trial = self._trial
        if trial is not None and trial.worker is not None:
            enough_s, last_s = trial.sent_s + trial.lasts_s, heard_s(trial.worker)
            shown_s = now_s if last_s is None else last_s
            if shown_s >= enough_s or now_s >= trial.sent_s + MOST_TRIAL_S:
                self.answered(trial.request)
        while self.cases and now_s - next(iter(self.cases.values())).changed_s >= REFUSED_S:
            self.cases.popitem(last=False)
        self._ended_s = {w: at for w, at in self._ended_s.items() if now_s - at < ENDED_S}
        self._gone_s = {w: at for w, at in self._gone_s.items() if now_s - at < ENDED_S}
        self._explained_s = {w: until for w, until in self._explained_s.items() if now_s < until}
        self._peers_try_s = {p: until for p, until in self._peers_try_s.items() if now_s < until}
        for worker, left in tuple(self._left.items()):
            if now_s - left[-1][1] >= REFUSED_S:
                del self._left[worker]

    # Peers.

    @property
    def is_trying(self) -> bool:
        """Whether a trial is under way here. Two would hide which request ended an engine."""
        return self._trial is not None

    def told(self, now_s: float) -> dict[str, float]:
        """The requests that were convicted here, and for how long each is refused; of many, the
        latest."""
        found: dict[str, float] = {}
        for request, case in reversed(self.cases.items()):
            if case.is_ours and case.refused_until_s > now_s and len(found) < MOST_TOLD:
                found[request] = case.refused_until_s - now_s
        return found

    def hear(
        self, peer: Hashable, told: dict[str, float], now_s: float, *, is_trying: bool
    ) -> None:
        """Refuses what a peer convicted, and begins no trial while the peer tries one."""
        if is_trying:
            self._peers_try_s[peer] = now_s + PEER_SILENT_S
        else:
            self._peers_try_s.pop(peer, None)
        for request, left_s in told.items():
            if self.standing(request, now_s) is not REFUSED:
                case = self._case(request, now_s)
                case.refused_until_s = now_s + min(left_s, REFUSED_S)
