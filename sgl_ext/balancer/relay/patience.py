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

from sgl_ext.balancer.http.request_head import RequestHead
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


MOST_LEFT = 256
MAX_SENT_BYTES = 256 * 1024
"""What a copy may have sent so that it can be taken over."""


def copy_key(head: RequestHead, body: bytes | bytearray) -> bytes:
    """Equal for two copies of a request."""
    found = head.copies_hash.copy()
    found.update(body)
    return found.digest()


class Copy(Protocol):
    """A request without a client.

    can_be_taken: whether all that was sent of its answer is still there.
    """

    @property
    def can_be_taken(self) -> bool: ...
    def stop(self) -> None: ...


class Resends:
    """The requests of one process whose clients have left: at most MOST_LEFT, one of each key.

    resend_s: how long one waits for its client; 0: it stops at once.
    """

    def __init__(
        self, failed: Failed, resend_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.resend_s = resend_s
        self.clock = clock
        self._guard = Guard("resends", failed)
        # In the order in which their clients left.
        self._left: dict[bytes, tuple[float, Copy]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def change(self, resend_s: float) -> None:
        """Changes how long a request waits for its client."""
        self.resend_s = resend_s

    def leave(self, key: bytes, copy: Copy) -> None:
        """The client of a copy has left. An earlier copy stops, and so does the one that waits
        longest if there are too many."""
        earlier = self._left.pop(key, None)
        if earlier is None and len(self._left) >= MOST_LEFT:
            earlier = self._left.pop(next(iter(self._left)))
        self._left[key] = self.clock(), copy
        if earlier is not None:
            self._stop(earlier[1])

    def take(self, key: bytes) -> Copy | None:
        """The copy with this key, which has a client again; None if there is none."""
        if not self._left or (found := self._left.get(key)) is None or not found[1].can_be_taken:
            return None
        del self._left[key]
        return found[1]

    def forget(self, key: bytes, copy: Copy) -> None:
        """A copy has ended without an answer that another client could get. A second call does
        nothing."""
        if (found := self._left.get(key)) is not None and found[1] is copy:
            del self._left[key]

    def sweep(self) -> None:
        """Stops the copies that no client has taken over in time. Call it periodically."""
        now_s = self.clock()
        for key, (left_s, copy) in tuple(self._left.items()):
            if now_s - left_s >= self.resend_s or not copy.can_be_taken:
                del self._left[key]
                self._stop(copy)

    def close(self) -> None:
        """Stops all."""
        left, self._left = self._left, {}
        for _, copy in left.values():
            self._stop(copy)

    def _stop(self, copy: Copy) -> None:
        with self._guard:
            copy.stop()


class NoClient:
    """Stands for the client of a copy while it has none: what it gets is dropped."""

    paused = False

    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None: ...
    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None: ...
    def write(self, data: bytes) -> None: ...
    def end_stream(self) -> None: ...

    def keep_awake(self) -> bool:
        return True


NO_CLIENT = NoClient()
