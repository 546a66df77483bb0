"""The turns of one WebSocket: its next response continues them although nothing may be stored.

Kept is the latest response of each lane and what it continues, as OpenAI's API keeps it. Beyond its
bytes, or without room in the byte budget, all are forgotten: the client then gets
`previous_response_not_found` and sends its whole conversation again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_ext.limits.bounds import MAX_LANES, SOCKET_TURNS_BYTES
from sgl_ext.limits.byte_account import Hold


class _Turn(NamedTuple):
    previous: str | None
    items: bytes


@dataclass(slots=True)
class ConnectionTurns:
    """hold: what the turns hold of the byte budget. forgot: called when all were forgotten."""

    hold: Hold
    forgot: Callable[[], object]
    limit_bytes: int = SOCKET_TURNS_BYTES
    _turns: dict[str, _Turn] = field(default_factory=dict)
    _latest: dict[str | None, str] = field(default_factory=dict)
    _closed: bool = False

    def lane(self, name: str | None) -> "LaneTurns":
        """The same turns, for requests of this lane."""
        return LaneTurns(self, name)

    def chain(self, id: str) -> tuple[list[bytes], str | None]:
        """The items of a turn and of those that it continues, as far as they are here, the oldest
        first; and the id of the turn before them, None if there is none."""
        items: list[bytes] = []
        rest: str | None = id
        while rest is not None and (turn := self._turns.get(rest)) is not None:
            items.append(turn.items)
            rest = turn.previous
        return items[::-1], rest

    def add(self, lane: str | None, id: str, previous: str | None, items: bytes) -> None:
        """Keeps a turn. Its lane's earlier ones stay only if it continues them."""
        if self._closed:
            return
        self._latest.pop(lane, None)
        self._latest[lane] = id
        while len(self._latest) > MAX_LANES:
            del self._latest[next(iter(self._latest))]
        self._turns[id] = _Turn(previous, items)
        reachable: dict[str, _Turn] = {}
        for latest in self._latest.values():
            at: str | None = latest
            while at is not None and at not in reachable and at in self._turns:
                reachable[at] = self._turns[at]
                at = reachable[at].previous
        self._turns = reachable
        size_bytes = sum(len(turn.items) for turn in reachable.values())
        if size_bytes > self.limit_bytes or not self.hold.take_up_to(size_bytes):
            self.clear()
            self.forgot()
        else:
            self.hold.set(size_bytes)

    def close(self) -> None:
        """Forgets all turns, and those that are still to come."""
        self._closed = True
        self.clear()

    def clear(self) -> None:
        self._turns.clear()
        self._latest.clear()
        self.hold.release()


@dataclass(frozen=True, slots=True)
class LaneTurns:
    """A connection's turns, for the requests of one lane."""

    turns: ConnectionTurns
    name: str | None

    def chain(self, id: str) -> tuple[list[bytes], str | None]:
        """As `ConnectionTurns.chain`: a lane can continue another one's responses."""
        return self.turns.chain(id)

    def add(self, id: str, previous: str | None, items: bytes) -> None:
        """Keeps a turn of this lane."""
        self.turns.add(self.name, id, previous, items)
