"""Requests whose clients have left, and may send them again.

A client that waits too long gives up, and sends the same body again. Its first copy goes on for
`resend_s` without a client, so that the second one need not begin behind all others: its connection
takes the first one's answer over.

    leave --> waits --take: the same key--> goes on with the new client
                |
                +--resend_s, or nothing left to take over--> stops

Of several processes on one port another one can get the copy. The process that holds the first one
tells the others, and the one that gets the copy passes it on there: each process listens on a Unix
socket in the folder that they share. To the process that holds the first one, that is a client
which sends it again. If it cannot be reached, the copy begins again where it is.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sgl_ext.balancer.http.request_head import HOP_BY_HOP, RequestHead, header_lines
from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection
from sgl_ext.supervision import Failed, Guard

MOST_LEFT = 256
MOST_LEFT_ELSEWHERE = 4_096
MAX_SENT_BYTES = 256 * 1024
"""What a request may have sent so that it can be taken over."""


def resend_key(head: RequestHead, body: bytes | bytearray) -> bytes:
    """Equal for a request and the one that its client sends again."""
    found = head.resend_hash.copy()
    found.update(body)
    return found.digest()


def socket_path(folder: Path, process: int) -> Path:
    """Where the process with this number takes copies of the requests whose clients left it."""
    return folder / f"{process}.sock"


# The body is decoded, and the process that gets it checks the key again.
_NOT_TO_PEERS = HOP_BY_HOP | {b"content-encoding", b"expect", b"host", b"x-request-id"}


class PeerPool(ConnectionPool):
    """Connections to another process of this balancer."""

    def __init__(self, path: Path) -> None:
        super().__init__("http://balancer")
        self._path = path

    def begin_of(self, head: RequestHead) -> bytes:
        """As its client sent it."""
        lines = header_lines(head.headers, _NOT_TO_PEERS)
        return self.request_line(head.method, head.target) + lines

    async def _open(self) -> UpstreamConnection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: UpstreamConnection(self), str(self._path)
        )
        return connection


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
    folder: of the sockets of all processes, if there are several.
    on_left: called with the key of each request whose client leaves.
    """

    def __init__(
        self, failed: Failed, resend_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.resend_s = resend_s
        self.clock = clock
        self.folder: Path | None = None
        self.on_left: Callable[[bytes], object] = lambda key: None
        self._pools: dict[int, PeerPool] = {}
        self.elsewhere: dict[bytes, tuple[float, int]] = {}
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
        self.on_left(key)
        if earlier is not None:
            self._stop(earlier[1])

    def take(self, key: bytes) -> Abandoned | None:
        """The request with this key, which has a client again; None if there is none."""
        if not self._left or (found := self._left.get(key)) is None or not found[1].can_be_taken:
            return None
        del self._left[key]
        return found[1]

    def left_elsewhere(self, key: bytes, process: int) -> None:
        """The client of the request with this key has left the process with this number."""
        self.elsewhere.pop(key, None)
        if len(self.elsewhere) >= MOST_LEFT_ELSEWHERE:
            del self.elsewhere[next(iter(self.elsewhere))]
        self.elsewhere[key] = self.clock(), process

    def holder(self, key: bytes) -> PeerPool | None:
        """The process that holds the request with this key; None if none is known. Only the next
        copy gets it, so that no copy is passed round."""
        found = self.elsewhere.pop(key, None) if self.elsewhere else None
        if found is None or self.folder is None:
            return None
        _, process = found
        pool = self._pools.get(process)
        if pool is None:
            pool = self._pools[process] = PeerPool(socket_path(self.folder, process))
        return pool

    def forget(self, key: bytes, request: Abandoned) -> None:
        """A request has ended without an answer that another client could get. A second call does
        nothing."""
        if (found := self._left.get(key)) is not None and found[1] is request:
            del self._left[key]

    def sweep(self) -> None:
        """Stops the requests that no client has taken over in time. Call it periodically."""
        now_s = self.clock()
        for pool in self._pools.values():
            pool.sweep()
        while self.elsewhere:
            key, (left_s, _) = next(iter(self.elsewhere.items()))
            if now_s - left_s < self.resend_s:
                break
            del self.elsewhere[key]
        for key, (left_s, request) in tuple(self._left.items()):
            if now_s - left_s >= self.resend_s or not request.can_be_taken:
                del self._left[key]
                self._stop(request)

    def close(self) -> None:
        """Stops all."""
        for pool in self._pools.values():
            pool.close()
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
