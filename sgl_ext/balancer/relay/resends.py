"""Requests whose clients have left, and may send them again.

A client that waits too long gives up, and sends the same body again. Its first copy goes on for
`resend_s` without a client, so that the second one need not begin behind all others: its connection
takes the first one's answer over.

    leave --> waits --take: the same key--> goes on with the new client
                |
                +--resend_s, or nothing left to take over--> stops
"""

import time
from collections.abc import Callable
from typing import Protocol

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.supervision import Failed, Guard

MOST_LEFT = 256
MAX_SENT_BYTES = 256 * 1024
"""What a request may have sent so that it can be taken over."""


def resend_key(head: RequestHead, body: bytes | bytearray) -> bytes:
    """Equal for a request and the one that its client sends again."""
    found = head.resend_hash.copy()
    found.update(body)
    return found.digest()


class Abandoned(Protocol):
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
        self._left: dict[bytes, tuple[float, Abandoned]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def change(self, resend_s: float) -> None:
        """Changes how long a request waits for its client."""
        self.resend_s = resend_s

    def leave(self, key: bytes, request: Abandoned) -> None:
        """The client of a request has left. An earlier one with the same key stops, and so does the
        one that waits longest if there are too many."""
        earlier = self._left.pop(key, None)
        if earlier is None and len(self._left) >= MOST_LEFT:
            earlier = self._left.pop(next(iter(self._left)))
        self._left[key] = self.clock(), request
        if earlier is not None:
            self._stop(earlier[1])

    def take(self, key: bytes) -> Abandoned | None:
        """The request with this key, which has a client again; None if there is none."""
        if not self._left or (found := self._left.get(key)) is None or not found[1].can_be_taken:
            return None
        del self._left[key]
        return found[1]

    def forget(self, key: bytes, request: Abandoned) -> None:
        """A request has ended without an answer that another client could get. A second call does
        nothing."""
        if (found := self._left.get(key)) is not None and found[1] is request:
            del self._left[key]

    def sweep(self) -> None:
        """Stops the requests that no client has taken over in time. Call it periodically."""
        now_s = self.clock()
        for key, (left_s, request) in tuple(self._left.items()):
            if now_s - left_s >= self.resend_s or not request.can_be_taken:
                del self._left[key]
                self._stop(request)

    def close(self) -> None:
        """Stops all."""
        left, self._left = self._left, {}
        for _, request in left.values():
            self._stop(request)

    def _stop(self, request: Abandoned) -> None:
        with self._guard:
            request.stop()


class NoClient:
    """Stands for the client of a request while it has none: what it gets is dropped."""

    paused = False

    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None: ...
    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None: ...
    def write(self, data: bytes) -> None: ...
    def end_stream(self) -> None: ...

    def keep_awake(self) -> bool:
        return True


NO_CLIENT = NoClient()
