"""Lines of the log about requests: at most so many a second for each cause.

A client, or an engine that fails, decides how many there are. What is left out is counted, and
`sweep` logs the number.
"""

import logging
from collections import Counter

log = logging.getLogger(__name__)

LINES = 3
"""The most lines of one cause between two sweeps."""
_MOST_CAUSES = 100
_OTHERS = "other causes"
_LONGEST = 300


class SampledLog:
    """The lines since the last sweep, by their message and cause."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def add(self, level: int, message: str, cause: str, **fields: object) -> None:
        """Logs a line, or counts it. message: a constant."""
        if len(self._seen) >= _MOST_CAUSES and (message, cause) not in self._seen:
            cause = _OTHERS
        self._seen[message, cause] += 1
        if self._seen[message, cause] <= LINES:
            shown = {
                name: value[:_LONGEST] if isinstance(value, str) else value
                for name, value in fields.items()
            }
            log.log(level, message, extra={"cause": cause[:_LONGEST], **shown})

    def sweep(self) -> None:
        """Logs how many lines were left out since the last call. Call it once a second."""
        for (message, cause), count in self._seen.items():
            if count > LINES:
                extra = {"cause": cause[:_LONGEST], "left_out": count - LINES}
                log.warning("%s: more of them", message, extra=extra)
        self._seen.clear()
