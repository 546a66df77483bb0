"""Sockets between the HTTP process of an engine and its scheduler, in the engine's own folder."""

from __future__ import annotations

import orjson
import zmq

from sgl_ext.engine.core import acknowledgements


def events_address() -> str:
    """The address that the scheduler sends prefix events to."""
    return f"ipc://{acknowledgements.folder() / 'events'}"


def _orders_address() -> str:
    return f"ipc://{acknowledgements.folder() / 'orders'}"


class Outbox:
    """Sends orders from the HTTP process to the scheduler."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(_orders_address())

    def unpin(self, prefixes: list[str]) -> None:
        """Orders that these pins are given up, which takes a second or two."""
        self._socket.send(orjson.dumps(prefixes), zmq.NOBLOCK)


class Inbox:
    """Receives these orders on the scheduler's entry rank."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.bind(_orders_address())

    def take(self) -> tuple[str, ...]:
        """The prefixes to unpin that came since the last call."""
        names: list[str] = []
        while self._socket.poll(0):
            names += orjson.loads(self._socket.recv())
        return tuple(names)
