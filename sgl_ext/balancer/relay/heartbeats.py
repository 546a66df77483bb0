"""What keeps the client of a stream awake while nothing of its answer is there.

A request can wait in the queue, and for the prefill of a long prompt, longer than its client or a
proxy accepts silence. So each stream that waits gets a beat after `first_s`, and then every
AGAIN_S. One sweep looks at the oldest of each table, so a request costs two changes of a dict.

    begin -> _silent --first_s--> beat -> _beaten --AGAIN_S--> beat -> ...
                 \\________ end: the first event, or the end of the request
"""

import time
from collections.abc import Callable
from typing import Protocol

from sgl_ext.supervision import Failed, Guard

AGAIN_S = 15.0


class Waiting(Protocol):
    """A stream that waits for its answer."""

    def beat(self) -> None: ...


class Heartbeats:
    """The streams of one process that wait. Each is an open request, so they need no bound.

    first_s: the longest silence before the first beat; 0: there are no beats.
    interval_s: the time between two calls of `sweep`, by which a beat may come too early.
    """

    def __init__(
        self,
        failed: Failed,
        first_s: float = 0.0,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first_s = first_s
        self.interval_s = interval_s
        self.clock = clock
        self._guard = Guard("heartbeats", failed)
        # In the order of their times, as all wait equally long.
        self._silent: dict[Waiting, float] = {}
        self._beaten: dict[Waiting, float] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._beaten)

    def change(self, first_s: float, interval_s: float) -> None:
        """Changes the settings."""
        self.first_s, self.interval_s = first_s, interval_s

    def begin(self, stream: Waiting) -> None:
        """The stream waits from now on."""
        if self.first_s:
            self._silent[stream] = self.clock()

    def end(self, stream: Waiting) -> None:
        """The stream does not wait any more. A second call does nothing."""
        if self._silent.pop(stream, None) is None:
            self._beaten.pop(stream, None)

    def sweep(self) -> None:
        """Beats for all streams that would be silent for too long. Call it periodically."""
        if not self.first_s:
            return
        now_s = self.clock()
        soon_s = now_s + self.interval_s
        for streams, after_s in ((self._silent, self.first_s), (self._beaten, AGAIN_S)):
            due = []
            for stream, since_s in streams.items():
                if since_s + after_s > soon_s:
                    break
                due.append(stream)
            for stream in due:
                del streams[stream]
                self._beaten[stream] = now_s
                with self._guard:
                    stream.beat()
