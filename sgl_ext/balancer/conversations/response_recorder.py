"""Records responses of /v1/responses on their way to the client."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from sgl_ext.balancer.conversations.stored_turns import is_complete

# Events whose data holds the response. Model output cannot match: its line ends are escaped.
_LIFECYCLE = re.compile(
    rb"^(event: response\.(?:created|queued|in_progress|completed|incomplete|failed)\ndata: )(.*)$",
    re.MULTILINE,
)


class ResponseRecorder:
    """Stores the response of one request, and returns the answer as it goes to the client.

    previous: the id of the response that the request continues, if any.
    store: stores the complete response; None if the client wants it not to be stored.
    note_background: gets the id of a response that an engine starts in the background.
    """

    def __init__(
        self,
        previous: str | None,
        store: Callable[[dict[str, Any]], None] | None,
        note_background: Callable[[str], None] | None = None,
    ) -> None:
        self._previous = previous
        self._store = store
        self._note_background = note_background

    def record_events(self, data: bytes) -> bytes:
        """Takes whole events of a stream. The response is stored before its last event is sent."""
        return _LIFECYCLE.sub(lambda match: match[1] + self._record(match[2], "response"), data)

    def record_body(self, body: bytes) -> bytes:
        """Takes the whole body of an answer."""
        return self._record(body)

    def _record(self, data: bytes, key: str = "") -> bytes:
        """Takes the JSON of a response, or of an object that has it at `key`."""
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            return data
        response = document[key] if isinstance(document, dict) and key in document else document
        if not isinstance(response, dict) or response.get("object") != "response":
            return data
        if self._previous is not None:
            response["previous_response_id"] = self._previous
        if self._store is not None and is_complete(response):
            self._store(response)
        elif self._note_background is not None and isinstance(response.get("id"), str):
            self._note_background(response["id"])
            self._note_background = None
        return data if self._previous is None else orjson.dumps(document)
