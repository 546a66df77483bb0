"""Messages between balancer processes: those that share a port, and those that share a store.

The processes share one prefix index, made from the engines' own events. What no engine knows is
sent to the peers over UDP on the loopback address: where a request was placed, so that the
session's next request goes there too, the load that each process puts on each worker, what the
admin API changed, and which request's client has left, for a copy that another process gets. There
are no requests and no acknowledgements. States are complete, never differences, and repeated every
second: a lost message is repaired by the next one, and the state of a dead process is forgotten.

A message begins with the group's secret; any other message is counted and dropped. The same
messages go to the balancers on other nodes through the store that they share, if there is one
(`StoreMessages`): there the store's password keeps others out.

    send ──> queue ──(every 50 ms)──> the store's channel ──> received

Such a message begins with a header: the sender's node and process. What processes of the same node
sent is ignored, because it has come over loopback already. The queue is bounded: while the store
fails, older placements are dropped and counted. Of states only the latest is sent. No answer waits
here.
"""

import asyncio
import hashlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from struct import Struct

from cachetools import TTLCache

from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.models import ModelPool, Models
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.balancer.store.calls import failure_of
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import SharedState
from sgl_ext.supervision import Guard, supervise
from sgl_ext.wire.peers import Left, Load, Message, Placed, State, encode, read_message

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


STATE_S = 1.0
LOAD_S = 0.01
SILENT_S = 3.0
_MOST_BYTES = 65_000
_MOST_SEGMENTS = 1_500
_IDLE = Load()
_MOST_PEERS = 4_096
MOST_READ = 64
"""Messages that are read before the event loop goes on: any process of the machine can send."""
# Linux then says with each message how many before it found no room. Python has no name for it.
_SO_RXQ_OVFL = 40
_COUNT = Struct("=I")
_ABOUT_BYTES = socket.CMSG_SPACE(_COUNT.size)


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """All processes of one balancer: this one's number, the sockets of all, and the memory that
    they share."""

    number: int
    secret: bytes
    sockets: tuple[socket.socket, ...]
    memory: GroupMemory | None = None

    @property
    def mine(self) -> socket.socket:
        """This process's socket."""
        return self.sockets[self.number]


@dataclass(eq=False)
class Peers:
    """Sends this process's placements and state to its peers, and applies theirs.

    group: the processes that share this one's port, if there are several.
    store: the way to balancers on other nodes, if there is one.
    left_elsewhere: gets the key of each request whose client has left another process, and the
        number of that.
    """

    group: PeerGroup | None
    models: Models
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    store: StoreMessages | None = None
    left_elsewhere: Callable[[bytes, int], object] | None = None

    def __post_init__(self) -> None:
        sockets = () if self.group is None else self.group.sockets
        others = [s for s in sockets if self.group is not None and s is not self.group.mine]
        self._addresses = [s.getsockname() for s in others]
        self._received: TTLCache[Hashable, dict[str, Load]] = TTLCache(
            _MOST_PEERS, SILENT_S, self.clock
        )
        self.metrics.tables.add("peers", self._received.__len__, lambda: _MOST_PEERS)
        self._sent: dict[str, Load] = {}
        self._load_due = False
        self._without_room = 0
        self._guard = Guard("peers", self.metrics.background_failed)
        self.models.on_new.append(self._follow)
        for pool in self.models.all:
            self._follow(pool)

    def _follow(self, pool: ModelPool) -> None:
        pool.router.attempts.on_begin.append(self.send_placed)
        pool.router.attempts.on_end.append(self.load_changed)

    def start(self) -> None:
        """Receives messages from now on."""
        if self.group is not None:
            self.group.mine.setblocking(False)
            with suppress(OSError):  # another system than Linux does not count them
                self.group.mine.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
            asyncio.get_running_loop().add_reader(self.group.mine, self._read, self.group)
        if self.store is not None:
            self.store.start(self._apply_counted)
        self.send_state()

    def stop(self) -> None:
        if self.group is not None:
            asyncio.get_running_loop().remove_reader(self.group.mine)
        if self.store is not None:
            self.store.stop()

    def send_placed(self, attempt: Attempt) -> None:
        """Sends where a request goes."""
        routing, prefix = attempt.routing, attempt.in_flight_prefix
        segments = () if prefix is None else prefix.segments[:_MOST_SEGMENTS]
        session = None if routing.session is None or routing.is_final else f"{routing.session:x}"
        hashes = [f"{segment:x}" for segment in segments]
        worker, tokens = attempt.worker.id, attempt.uncached_tokens
        agent = None if session is None else f"{routing.agent:x}"
        about = routing.prompt_tokens, tokens, routing.tenant, routing.priority, agent
        self._send(Placed(worker, session, hashes, *about))
        self.load_changed()

    def send_left(self, key: bytes) -> None:
        """Sends that the client of a request has left, to the processes of this node."""
        if self.group is not None:
            message = Left(key.hex(), self.group.number)
            self._send_to_group(self.group, self.group.secret + encode(message))

    def load_changed(self) -> None:
        """Sends this process's load in a moment, because much changes at once."""
        if not self._load_due:
            self._load_due = True
            asyncio.get_running_loop().call_later(LOAD_S, self._send_load)

    def _send_load(self) -> None:
        self._load_due = False
        if self._loads() != self._sent:
            self.send_state()

    def send_state(self) -> None:
        """Sends the loads and the admin API's changes. Call it every STATE_S."""
        self._sent = self._loads()
        now_s, suspects = self.clock(), [pool.router.suspects for pool in self.models.all]
        refused = {name: s for each in suspects for name, s in each.told(now_s).items()}
        is_trying = any(each.is_trying for each in suspects)
        self._send(State(self._sent, self.models.workers.admin, refused, is_trying))
        self._add_up(self.models.workers.all)  # a silent peer's load is gone

    def _loads(self) -> dict[str, Load]:
        workers = self.models.workers.all
        return {w.id: w.load for w in workers if w.in_flight or w.pending_tokens or w.decoding}

    def _send(self, message: Message) -> None:
        data = encode(message)
        if self.store is not None:
            self.store.send(data, is_state=isinstance(message, State))
        if self.group is not None:
            self._send_to_group(self.group, self.group.secret + data)

    def _send_to_group(self, group: PeerGroup, data: bytes) -> None:
        if len(data) > _MOST_BYTES:
            self.metrics.peer_message_faults.counts[("too long",)] += 1
            return
        for address in self._addresses:
            try:
                group.mine.sendto(data, address)
            except OSError:
                self.metrics.peer_message_faults.counts[("not sent",)] += 1

    def _read(self, group: PeerGroup) -> None:
        """Reads some messages. The loop calls it again while there are more."""
        for _ in range(MOST_READ):
            try:
                data, about, _, address = group.mine.recvmsg(_MOST_BYTES, _ABOUT_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            self._count_lost(about)
            with self._guard:
                try:
                    self.receive(data, address)
                except ValueError:
                    self.metrics.peer_message_faults.counts[("unreadable",)] += 1

    def _count_lost(self, about: list[tuple[int, int, bytes]]) -> None:
        """Counts the messages that found no room in the socket. about: what the kernel says."""
        for level, kind, number in about:
            if (level, kind) == (socket.SOL_SOCKET, _SO_RXQ_OVFL):
                (total,) = _COUNT.unpack(number)
                # The kernel's count has 32 bits.
                lost = (total - self._without_room) % (1 << 32)
                self.metrics.peer_message_faults.counts[("no room",)] += lost
                self._without_room = total

    def receive(self, data: bytes, address: tuple[str, int]) -> None:
        """Applies the message of a process of the group. Raises ValueError if it is malformed."""
        secret = b"" if self.group is None else self.group.secret
        if data[: len(secret)] != secret:
            raise ValueError("not from a peer")
        self.apply(data[len(secret) :], address)

    def _apply_counted(self, data: bytes, sender: bytes) -> None:
        with self._guard:
            try:
                self.apply(data, sender)
            except ValueError:
                self.metrics.peer_message_faults.counts[("unreadable",)] += 1

    def apply(self, data: bytes, sender: Hashable) -> None:
        """Applies a peer's message. Raises ValueError if it is malformed."""
        message = read_message(data)
        if isinstance(message, Placed):
            worker = self.models.workers.find(message.worker)
            if worker is not None:
                self.models.router_of(worker).attempts.record_of_peer(
                    worker,
                    None if message.session is None else int(message.session, 16),
                    [int(segment, 16) for segment in message.segments],
                    message.prompt_tokens,
                    message.uncached_tokens,
                    message.tenant,
                    message.priority,
                    None if message.agent is None else int(message.agent, 16),
                )
            return
        if isinstance(message, Left):
            if self.left_elsewhere is not None:
                self.left_elsewhere(bytes.fromhex(message.key), message.process)
            return
        self.models.workers.change(message.admin)
        now_s = self.clock()
        for pool in self.models.all:
            suspects = pool.router.suspects
            suspects.hear(sender, message.refused, now_s, is_trying=message.is_trying)
        before, loads = self._received.get(sender, {}), message.loads
        self._received[sender] = loads
        names = before.keys() | loads.keys()
        changed = (name for name in names if before.get(name) != loads.get(name))
        found = (self.models.workers.find(name) for name in changed)
        self._add_up([worker for worker in found if worker is not None])
        for pool in self.models.all:
            pool.router.capacity_changed()

    def _add_up(self, workers: Iterable[Worker]) -> None:
        now_s, received = self.clock(), [*self._received.values()]
        for worker in workers:
            loads = [loads[worker.id] for loads in received if worker.id in loads]
            worker.peer_load = Load(*map(sum, zip(*loads, strict=True))) if loads else _IDLE
            self.models.router_of(worker).fleet.load_changed(worker, now_s)
