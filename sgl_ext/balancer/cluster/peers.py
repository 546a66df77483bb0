"""Messages between the balancer processes that share a port.

The processes share one prefix index, made from the engines' own events. What no engine knows is
sent to the peers over UDP on the loopback address: where a request was placed, so that the
session's next request goes there too, the load that each process puts on each worker, and what the
admin API changed. There are no requests and no acknowledgements. States are complete, never
differences, and repeated every second: a lost message is repaired by the next one, and the state of
a dead process is forgotten.

A message begins with the group's secret; any other message is counted and dropped.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from cachetools import TTLCache

from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import Attempt
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Load
from sgl_ext.membership.merging import AdminChanges
from sgl_ext.supervision import Guard

STATE_S = 1.0
LOAD_S = 0.01
SILENT_S = 3.0
_MOST_BYTES = 65_000
_MOST_SEGMENTS = 1_500
_IDLE = Load()


class _Placed(msgspec.Struct, tag=True):
    """Where a request was placed; the hashes are in hexadecimal digits."""

    worker: str
    session: str | None
    segments: list[str]
    prompt_tokens: int
    uncached_tokens: int


class _State(msgspec.Struct, tag=True):
    """The load that a process puts on each worker, by the worker's id, where there is any."""

    loads: dict[str, Load]
    admin: AdminChanges


_DECODER = msgspec.json.Decoder(_Placed | _State)


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
    """Sends this process's placements and state to its peers, and applies theirs."""

    group: PeerGroup
    router: Router
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        others = [s for s in self.group.sockets if s is not self.group.mine]
        self._addresses = [s.getsockname() for s in others]
        self._received: TTLCache[tuple[str, int], dict[str, Load]] = TTLCache(
            len(self.group.sockets), SILENT_S, self.clock
        )
        self._sent: dict[str, Load] = {}
        self._load_due = False
        self._guard = Guard("peers", self.metrics.background_failed)
        self.router.attempts.on_begin.append(self.send_placed)
        self.router.attempts.on_end.append(self.load_changed)

    def start(self) -> None:
        """Receives messages from now on."""
        self.group.mine.setblocking(False)
        asyncio.get_running_loop().add_reader(self.group.mine, self._read)
        self.send_state()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self.group.mine)

    def send_placed(self, attempt: Attempt) -> None:
        """Sends where a request goes."""
        routing, prefix = attempt.routing, attempt.in_flight_prefix
        segments = () if prefix is None else prefix.segments[:_MOST_SEGMENTS]
        session = None if routing.session is None or routing.is_final else f"{routing.session:x}"
        hashes = [f"{segment:x}" for segment in segments]
        worker, tokens = attempt.worker.id, attempt.uncached_tokens
        self._send(_Placed(worker, session, hashes, routing.prompt_tokens, tokens))
        self.load_changed()

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
        self._send(_State(self._sent, self.router.workers.admin))
        self._add_up()

    def _loads(self) -> dict[str, Load]:
        return {w.id: w.load for w in self.router.workers.all if w.load != _IDLE}

    def _send(self, message: _Placed | _State) -> None:
        data = self.group.secret + msgspec.json.encode(message)
        if len(data) > _MOST_BYTES:
            self.metrics.peer_message_faults.counts[("too long",)] += 1
            return
        for address in self._addresses:
            try:
                self.group.mine.sendto(data, address)
            except OSError:
                self.metrics.peer_message_faults.counts[("not sent",)] += 1

    def _read(self) -> None:
        while True:
            try:
                data, address = self.group.mine.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            with self._guard:
                try:
                    self.receive(data, address)
                except ValueError:
                    self.metrics.peer_message_faults.counts[("unreadable",)] += 1

    def receive(self, data: bytes, address: tuple[str, int]) -> None:
        """Applies a peer's message. Raises ValueError if it is malformed."""
        secret = self.group.secret
        if data[: len(secret)] != secret:
            raise ValueError("not from a peer")
        message = _DECODER.decode(data[len(secret) :])
        if isinstance(message, _Placed):
            worker = self.router.workers.find(message.worker)
            if worker is not None:
                self.router.attempts.record_of_peer(
                    worker,
                    None if message.session is None else int(message.session, 16),
                    [int(segment, 16) for segment in message.segments],
                    message.prompt_tokens,
                    message.uncached_tokens,
                )
            return
        self.router.workers.change(message.admin)
        self._received[address] = message.loads
        self._add_up()
        self.router.capacity_changed()

    def _add_up(self) -> None:
        for worker in self.router.workers.all:
            loads = [loads.get(worker.id, _IDLE) for loads in self._received.values()]
            worker.peer_load = Load(*map(sum, zip(*loads, strict=True))) if loads else Load()
