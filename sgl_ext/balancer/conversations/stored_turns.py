"""Turns of /v1/responses as the store has them, and their recording.

A stored turn has the request's own input items and the items of the answer, unchanged, and is
linked to the turn that it continues. A request that continues it gets the items of all these
turns ahead of its own. The engine then gets what a client would send that keeps its conversation
itself, and finds the prefix in its cache. `instructions` and `tools` are never inherited, as in
OpenAI's API.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import orjson

_Json = dict[str, Any]
_COMPLETE = ("completed", "incomplete")
# Events whose data holds the response. Model output cannot match: its line ends are escaped.
_LIFECYCLE = re.compile(
    rb"^(event: response\.(?:created|queued|in_progress|completed|incomplete|failed)\ndata: )(.*)$",
    re.MULTILINE,
)


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
    store: stores the complete response; None if the client wants it not to be stored.
    note_background: gets the id of a response that an engine starts in the background.
    """

    previous: str | None
    store: Callable[[_Json], None] | None
    note_background: Callable[[str], None] | None = None

    def record_events(self, data: bytes) -> bytes:
        """Takes whole events of a stream. The response is stored before its last event is sent."""
        return _LIFECYCLE.sub(lambda match: match[1] + self.record(match[2], "response"), data)

    def record(self, data: bytes, key: str = "") -> bytes:
        """Takes a whole body: the JSON of a response, or of an object that has it at `key`."""
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            return data
        response = document[key] if isinstance(document, dict) and key in document else document
        if not isinstance(response, dict) or response.get("object") != "response":
            return data
        if self.previous is not None:
            response["previous_response_id"] = self.previous
        if self.store is not None and _is_complete(response):
            self.store(response)
        elif self.note_background is not None and isinstance(response.get("id"), str):
            self.note_background(response["id"])
            self.note_background = None
        return data if self.previous is None else orjson.dumps(document)


def _is_complete(response: _Json) -> bool:
    """Whether a response is complete, so that a request can continue it."""
    return (
        response.get("status") in _COMPLETE
        and isinstance(response.get("id"), str)
        and isinstance(response.get("output"), list)
    )
