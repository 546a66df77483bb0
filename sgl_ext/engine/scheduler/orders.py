"""Orders that all ranks of an engine carry out in the same iteration."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
import zmq

from sgl_ext.engine.core.channels import orders_address


@dataclass(frozen=True, slots=True)
class Order:
    """Time goes on to `now_s`, and the pins of the prefixes in `unpin` are given up."""

    now_s: float
    unpin: tuple[str, ...] = ()


class OrderInbox:
    """The prefixes that the HTTP process wants to be unpinned. On the entry rank only."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.bind(orders_address())

    def take(self) -> tuple[str, ...]:
        """The names that came since the last call."""
        names: list[str] = []
        while self._socket.poll(0):
            names += orjson.loads(self._socket.recv())
        return tuple(names)
