"""What a node refused or failed of late, by reason: of each process, and of all in the last minute.

A reason is the error's message without its numbers, so reasons are few. An engine's own error
has its status in place of its words. Wrong requests, whose answers are the clients' fault, are not
counted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

INTERVAL_S = 10
_INTERVALS = 6
MOST_REASONS = 32
OTHERS = "other reasons"
_NUMBER = re.compile(r"\d[\d.e+]*")
_TOO_MANY, _SERVER_ERROR = 429, 500


def reason_of(status: int | None, outcome: str, error: str | None) -> str | None:
    """Why a request was refused or failed; None if it was neither. outcome, error: as its line of
    the request log has them."""
    if outcome == "cut":
        return "A stream was cut."
    if status is None or (status != _TOO_MANY and status < _SERVER_ERROR):
        return None
    if error is None or outcome == "complete":
        return f"An engine answered {status}."
    return _NUMBER.sub("N", error)


class Failures:
    """One process's failures of the last minute. Times are wall-clock seconds."""

    def __init__(self) -> None:
        self._intervals: dict[int, Counter[str]] = {}
        self._reasons: set[str] = set()

    def add(self, now_s: float, reason: str) -> str:
        """Counts one. Returns the reason that it counts under, one of MOST_REASONS."""
        if reason not in self._reasons:
            if len(self._reasons) >= MOST_REASONS:
                reason = OTHERS
            self._reasons.add(reason)
        number = int(now_s) // INTERVAL_S
        if number not in self._intervals:
            oldest = number - _INTERVALS
            self._intervals = {at: c for at, c in self._intervals.items() if at >= oldest}
            self._intervals[number] = Counter()
        self._intervals[number][reason] += 1
        return reason

    def as_json(self) -> list[Any]:
        """What `last_minute` adds up."""
        return [[number, dict(counts)] for number, counts in self._intervals.items()]


def last_minute(documents: Iterable[Iterable[Any]], now_s: float) -> list[Mapping[str, Any]]:
    """How many requests were refused or failed within the last minute in all processes, by reason,
    the most frequent first."""
    total: Counter[str] = Counter()
    first = int(now_s) // INTERVAL_S - _INTERVALS
    for document in documents:
        for number, counts in document:
            if number > first:
                total.update(counts)
    return [{"reason": reason, "count": count} for reason, count in total.most_common()]
