"""Balancer processes that share a port tell each other what they decide.

Each has the whole index from the engines' own events. What no engine can tell is said
here, over UDP on the loopback address: where a request was sent, so that the next one
of its session agrees, what load each process puts on each worker, and which workers
there are. Nothing is asked and nothing is acknowledged. States are whole, never
differences, and are repeated every second: what is lost is made good by the next one,
and what a dead process said is forgotten.

    {"placed": [worker, session | null, [segment, ...], prompt_tokens, uncached_tokens]}
    {"state": {worker: [in_flight, decoding, pending_tokens], ...},
     "table": [changed_s, {worker: draining, ...}]}

A message begins with the siblings' common secret; any other is counted and dropped.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempt import Attempt
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Load

STATE_S = 1.0
LOAD_S = 0.01
SILENT_S = 3.0
_MOST_BYTES = 65_000
_MOST_SEGMENTS = 1_500


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """All processes of one balancer: who this one is, its socket, and where all of them are."""

    number: int
    secret: bytes
    sockets: tuple[socket.socket, ...]

    @property
    def mine(self) -> socket.socket:
        return self.sockets[self.number]

    @property
    def others(self) -> list[tuple[str, int]]:
        """The addresses of the others."""
        return [s.getsockname() for n, s in enumerate(self.sockets) if n != self.number]


class Peers:
    """One process's ear and mouth."""

    def __init__(
        self,
        group: PeerGroup,
        router: Router,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._router = router
        self._metrics = metrics
        self._clock = clock
        self._heard: dict[tuple[str, int], tuple[float, dict[str, Load]]] = {}
        self._said: dict[str, Load] = {}
        self._load_due = False
        router.on_placed(self.send_placed)
        router.on_end(self.load_changed)

    def start(self) -> None:
        """Listens from now on."""
        self._group.mine.setblocking(False)
        asyncio.get_running_loop().add_reader(self._group.mine, self._read)
        self.send_state()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._group.mine)

    def send_placed(self, attempt: Attempt) -> None:
        """Says where a request goes."""
        routing, in_flight_prefix = attempt.routing, attempt.in_flight_prefix
        segments = () if in_flight_prefix is None else in_flight_prefix.segments[:_MOST_SEGMENTS]
        session = None if routing.session is None or routing.is_final else f"{routing.session:x}"
        self._say(
            {
                "placed": [
                    attempt.worker.url,
                    session,
                    [f"{segment:x}" for segment in segments],
                    routing.prompt_tokens,
                    attempt.uncached_tokens,
                ]
            }
        )
        self.load_changed()

    def load_changed(self) -> None:
        """Says what this process's load is, a moment from now: much changes at once."""
        if not self._load_due:
            self._load_due = True
            asyncio.get_running_loop().call_later(LOAD_S, self._tell_load)

    def _tell_load(self) -> None:
        self._load_due = False
        if self._loads() != self._said:
            self.send_state()

    def send_state(self) -> None:
        """Says everything that a sibling must know. Run it every STATE_S."""
        workers = self._router.workers
        self._said = self._loads()
        table = {worker.url: worker.draining for worker in workers.all}
        state = {url: tuple(load) for url, load in self._said.items()}
        self._say({"state": state, "table": [workers.changed_s, table]})
        self._forget_silent()

    def _loads(self) -> dict[str, Load]:
        return {worker.url: worker.load for worker in self._router.workers.all}

    def _say(self, message: dict[str, Any]) -> None:
        data = self._group.secret + orjson.dumps(message)
        if len(data) > _MOST_BYTES:
            self._metrics.peer_message_faults.counts[("too long",)] += 1
            return
        for address in self._group.others:
            try:
                self._group.mine.sendto(data, address)
            except OSError:
                self._metrics.peer_message_faults.counts[("not sent",)] += 1

    def _read(self) -> None:
        while True:
            try:
                data, address = self._group.mine.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            try:
                self.hear(data, address)
            except (ValueError, KeyError, TypeError, AttributeError):
                self._metrics.peer_message_faults.counts[("unreadable",)] += 1

    def hear(self, data: bytes, address: tuple[str, int]) -> None:
        """Takes in a sibling's message. Raises ValueError and the like on any other."""
        secret = self._group.secret
        if data[: len(secret)] != secret:
            raise ValueError("not from a sibling")
        message = orjson.loads(data[len(secret) :])
        if "placed" in message:
            url, session, segments, prompt_tokens, uncached_tokens = message["placed"]
            worker = self._router.workers.find(url)
            if worker is not None:
                self._router.record_peer_placement(
                    worker,
                    None if session is None else int(session, 16),
                    [int(segment, 16) for segment in segments],
                    (prompt_tokens, uncached_tokens),
                )
            return
        loads = {url: Load(*map(int, load)) for url, load in message["state"].items()}
        changed_s, table = message["table"]
        self._router.workers.adopt(changed_s, table)
        self._heard[address] = (self._clock(), loads)
        self._sum_up()
        self._router.capacity_changed()

    def _forget_silent(self) -> None:
        now_s = self._clock()
        silent = [
            a for a, (last_heard_s, _) in self._heard.items() if now_s - last_heard_s > SILENT_S
        ]
        for address in silent:
            del self._heard[address]
        if silent:
            self._sum_up()

    def _sum_up(self) -> None:
        for worker in self._router.workers.all:
            loads = [loads.get(worker.url, Load()) for _, loads in self._heard.values()]
            worker.peer_load = Load(*map(sum, zip(*loads, strict=True))) if loads else Load()
