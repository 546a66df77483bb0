"""The messages that a gateway has not taken yet. One task writes them, one after another."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.epp.messages import Response

log = logging.getLogger(__name__)

# Then the answer is not read any further.
_MAX_BYTES = 256 * 1024


class Outbox:
    """is_full: the gateway does not read as fast as messages come. on_room: called when it does
    again."""

    def __init__(
        self,
        write: Callable[[Response], Awaitable[None]],
        metrics: Metrics,
        failed: Callable[[], None],
    ) -> None:
        """failed: called once if a message cannot be sent, or if `on_room` fails. No message
        follows then."""
        self.is_full = False
        self._failed = failed
        self._is_closed = False
        self.on_room: Callable[[], None] = lambda: None
        self._write = write
        self._metrics = metrics
        self._unsent: deque[tuple[Response, int]] = deque()
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None

    def post(self, response: Response, size_bytes: int = 0) -> None:
        """Sends a message after those before it. size_bytes: what it counts with."""
        if self._is_closed:
            return
        self._unsent.append((response, size_bytes))
        self._bytes += size_bytes
        self.is_full = self._bytes > _MAX_BYTES
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    def post_all(self, responses: Iterable[Response], size_bytes: int) -> None:
        """As `post`, with several messages of this size in all."""
        for response in responses:
            self.post(response, size_bytes)
            size_bytes = 0

    async def emptied(self) -> None:
        """Waits until every message is written, or none is any more."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def close(self) -> None:
        """Begins to write no other message. gRPC cannot take the one back that it writes, and ends
        no stream before that one is written: wait until it is `emptied`."""
        self._is_closed = True
        self._unsent.clear()

    async def _write_all(self) -> None:
        try:
            while self._unsent:
                response, size_bytes = self._unsent.popleft()
                await self._write(response)
                self._bytes -= size_bytes
                if self.is_full and self._bytes <= _MAX_BYTES // 2:
                    self.is_full = False
                    self.on_room()
        except Exception as error:  # most often the gateway has left
            log.debug("a message to the gateway was not sent: %r", error)
            if not self._is_closed:
                self._metrics.gateway_fault("unsent message")
                self._failed()
            self.close()
        finally:
            self._writing = None
