"""Messages to and from the balancers on other nodes, through the store that they share.

    send ──> queue ──(every 50 ms)──> the store's channel ──> received

A message begins with a header: the sender's node and process. What processes of the same node sent
is ignored, because it has come over loopback already. The queue is bounded: while the store fails,
older placements are dropped and counted. Of states only the latest is sent. No answer waits here.
"""

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Callable
from contextlib import aclosing

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import failure_of
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import SharedState
from sgl_ext.supervision import supervise

SEND_S = 0.05
_AGAIN_S = 1.0
MOST_QUEUED = 1_000
_MOST_BATCH_BYTES = 1 << 20
_NODE_BYTES, _HEADER_BYTES = 8, 10
Received = Callable[[bytes, bytes], object]


class StoreMessages:
    """One process's way to the balancers of other nodes."""

    def __init__(
        self, state: SharedState, metrics: Metrics, secret: bytes | None = None, number: int = 0
    ) -> None:
        """secret: what the processes of this node have in common; None if there is one only."""
        self._state = state
        self._metrics = metrics
        self._node = hashlib.sha256(secret or os.urandom(16)).digest()[:_NODE_BYTES]
        self._header = self._node + number.to_bytes(_HEADER_BYTES - _NODE_BYTES)
        self._queued: deque[bytes] = deque()
        self._latest_state: bytes | None = None
        metrics.tables.add("store_messages", self._queued.__len__, lambda: MOST_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, received: Received) -> None:
        """Sends and receives from now on. received: gets each message and its sender."""
        failed = self._metrics.background_failed
        self._tasks = [
            asyncio.create_task(supervise("store_messages", failed, self.send_queued, SEND_S)),
            asyncio.create_task(
                supervise("store_messages", failed, lambda: self._receive(received), _AGAIN_S)
            ),
        ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def send(self, data: bytes, *, is_state: bool) -> None:
        """Queues a message. A state replaces the one before it."""
        if is_state:
            self._latest_state = self._header + data
            return
        if len(self._queued) == MOST_QUEUED:
            self._queued.popleft()
            self._metrics.peer_message_faults.counts[("not sent",)] += 1
        self._queued.append(self._header + data)

    async def send_queued(self) -> None:
        """Sends what is queued, the state last. Call it periodically."""
        batch, size = [], 0
        while self._queued and size < _MOST_BATCH_BYTES:
            batch.append(self._queued.popleft())
            size += len(batch[-1])
        if self._latest_state is not None:
            batch.append(self._latest_state)
            self._latest_state = None
        if not batch:
            return
        try:
            await self._state.publish(batch)
        except StoreFailed:  # which is counted and logged there
            self._metrics.peer_message_faults.counts[("not sent",)] += len(batch)

    async def _receive(self, received: Received) -> None:
        """Receives until the connection ends, and raises what ended it."""
        try:
            async with aclosing(self._state.messages()) as messages:
                async for message in messages:
                    if message[:_NODE_BYTES] != self._node:
                        received(message[_HEADER_BYTES:], message[:_HEADER_BYTES])
        except Exception as error:
            raise failure_of(error) from None
