"""Turns of /v1/responses as the store and a WebSocket have them, and their recording.

A stored turn has the request's own input items and the items of the answer, unchanged, and is
linked to the turn that it continues. A request that continues it gets the items of all these
turns ahead of its own. The engine then gets what a client would send that keeps its conversation
itself, and finds the prefix in its cache. `instructions` and `tools` are never inherited, as in
OpenAI's API.

The next response of a WebSocket continues its turns although nothing may be stored. Kept is the
latest response of each lane and what it continues, as OpenAI's API keeps it. Beyond its bytes, or
without room in the byte budget, all are forgotten: the client then gets
`previous_response_not_found` and sends its whole conversation again.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from sgl_ext.limits.bounds import MAX_LANES, SOCKET_TURNS_BYTES
from sgl_ext.limits.byte_account import Hold

_Json = dict[str, Any]
_COMPLETE = ("completed", "incomplete")
# Events whose data holds the response. Model output cannot match: its line ends are escaped.
_LIFECYCLE = re.compile(
    rb"^(event: response\.(?:created|queued|in_progress|completed|incomplete|failed)\ndata: )(.*)$",
    re.MULTILINE,
)
_LAST = re.compile(rb"^event: response\.(?:completed|incomplete)\n", re.MULTILINE)


def own_items(body: _Json) -> list[Any] | None:
    """The input items of a request; None if its input is malformed."""
    entered = body.get("input")
    if isinstance(entered, str):
        return [{"role": "user", "content": entered}]
    if entered is None:
        return []
    return entered if isinstance(entered, list) else None


def continued(body: _Json, earlier: Iterable[bytes], own: list[Any]) -> _Json:
    """A request with the items of earlier turns ahead of its own; `earlier` is from `packed`."""
    items = [item for turn in earlier for item in unpacked(turn)]
    expanded = {**body, "input": items + own}
    del expanded["previous_response_id"]
    return expanded


def packed(entered: bytes, output: list[Any]) -> bytes:
    """Serializes a turn: its input items, which are JSON already, and the items of its answer."""
    return b'{"input":%b,"output":%b}' % (entered, orjson.dumps(output))


def unpacked(turn: bytes) -> list[Any]:
    """All items of a serialized turn, in order."""
    document = orjson.loads(turn)
    return [*document["input"], *document["output"]]


def about(response: _Json) -> bytes:
    """A response without its items."""
    return orjson.dumps({**response, "output": []})


def response_of(about: bytes, items: bytes) -> _Json:
    """The response as the client got it."""
    response: _Json = orjson.loads(about)
    return {**response, "output": orjson.loads(items)["output"]}


def listed(response_id: str, chain: list[bytes]) -> list[_Json]:
    """All input items of the last turn of a chain, in order, as OpenAI's API lists them.

    An item without an id gets one that is the same each time.
    """
    entered = [item for turn in chain[:-1] for item in unpacked(turn)]
    entered += orjson.loads(chain[-1])["input"]
    stem = response_id.removeprefix("resp_")
    return [_listed(item, f"msg_{stem}_{k}") for k, item in enumerate(entered)]


def _listed(item: Any, id: str) -> _Json:
    shown: _Json = {"id": id, "type": "message"}
    if isinstance(item, dict):
        shown |= {key: value for key, value in item.items() if value is not None}
    if isinstance(text := shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": text}]
    return shown


@dataclass(slots=True)
class ResponseRecorder:
    """Stores the response of one request, and returns the answer as it goes to the client.

    previous: the id of the response that the request continues, if any.
    store: stores the complete response; False if that failed. None if the client wants it not to
        be stored.
    note_background: gets the id of a response that an engine starts in the background.
    """

    previous: str | None
    store: Callable[[_Json], Awaitable[bool]] | None
    note_background: Callable[[str], Awaitable[object]] | None = None
    _end: bytes = b""

    @property
    def holds_end(self) -> bool:
        """Whether `record_end` has events for the client."""
        return self._end != b""

    @property
    def held_bytes(self) -> int:
        """The bytes of the answer that it holds."""
        return len(self._end)

    def record_events(self, data: bytes) -> bytes:
        """Takes whole events of a stream and returns those for the client. The event with the
        complete response, and what follows it, waits for `record_end`."""
        if self._end:
            self._end += data
            return b""
        if self.store is not None and (last := _LAST.search(data)) is not None:
            data, self._end = data[: last.start()], data[last.start() :]
        return _LIFECYCLE.sub(lambda match: match[1] + self._begun(match[2]), data)

    async def record_end(self) -> bytes:
        """Stores the response of a stream that has ended, and returns its last events."""
        last = _LIFECYCLE.match(self._end)
        if last is None:  # its data is in several lines
            return self._end
        return last[1] + await self.record(last[2], "response") + self._end[last.end() :]

    async def record(self, data: bytes, key: str = "") -> bytes:
        """Takes a whole body: the JSON of a response, or of an object that has it at `key`.

        A response that could not be stored has `store: false`.
        """
        document, response = _response_in(data, key)
        if response is None:
            return data
        is_changed = self._name_previous(response)
        if self.store is not None and _is_complete(response):
            if not await self.store(response):
                response["store"], is_changed = False, True
        elif (noting := self._note(response)) is not None:
            await noting
        return orjson.dumps(document) if is_changed else data

    def _begun(self, data: bytes) -> bytes:
        """The data of an event with a response that is not complete."""
        document, response = _response_in(data, "response")
        if response is None:
            return data
        self._note(response)
        return orjson.dumps(document) if self._name_previous(response) else data

    def _name_previous(self, response: _Json) -> bool:
        if self.previous is not None:
            response["previous_response_id"] = self.previous
        return self.previous is not None

    def _note(self, response: _Json) -> Awaitable[object] | None:
        note, self.note_background = self.note_background, None
        id = response.get("id")
        return None if note is None or not isinstance(id, str) else note(id)


def _response_in(data: bytes, key: str) -> tuple[Any, _Json | None]:
    """The JSON of `data`, and the response in it, None if there is none."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None, None
    response = document[key] if isinstance(document, dict) and key in document else document
    is_response = isinstance(response, dict) and response.get("object") == "response"
    return document, response if is_response else None


def _is_complete(response: _Json) -> bool:
    """Whether a response is complete, so that a request can continue it."""
    return (
        response.get("status") in _COMPLETE
        and isinstance(response.get("id"), str)
        and isinstance(response.get("output"), list)
    )


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

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self._closed

    def close(self) -> None:
        """Forgets all turns, and those that are still to come."""
        self._closed = True
        self.clear()

    def clear(self) -> None:
        self._turns.clear()
        self._latest.clear()
        self.hold.release()


@dataclass(slots=True)
class LaneTurns:
    """A connection's turns, for a request of one lane."""

    turns: ConnectionTurns
    name: str | None
    _late: tuple[str, str | None, bytes] | None = None

    def chain(self, id: str) -> tuple[list[bytes], str | None]:
        """As `ConnectionTurns.chain`: a lane can continue another one's responses."""
        return self.turns.chain(id)

    def add(self, id: str, previous: str | None, items: bytes) -> None:
        """Keeps a turn of this lane."""
        if self.turns.is_closed:
            self._late = id, previous, items
        self.turns.add(self.name, id, previous, items)

    def become(self, other: "LaneTurns") -> None:
        """The request's client has a new connection, with a lane for its turn."""
        self.turns, self.name = other.turns, other.name
        late, self._late = self._late, None
        if late is not None:
            self.add(*late)
