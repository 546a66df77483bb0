"""The answer to a request of /v1/responses: kept when it is complete, told what it continues."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from sgl_ext.balancer.conversations.stored_turns import is_kept

# The events that hold the response, and it alone; what a model says has its line ends escaped.
_LIFECYCLE = re.compile(
    rb"^(event: response\.(?:created|queued|in_progress|completed|incomplete|failed)\ndata: )(.*)$",
    re.MULTILINE,
)


class Turn:
    """A request under way: it is told the answer, and gives it as it is to go out.

    previous: the id of the response that it continues, if any.
    keep: takes the complete response, if it is to be kept.
    begin: takes the id of a response that has begun in the background of an engine.
    """

    def __init__(
        self,
        previous: str | None,
        keep: Callable[[dict[str, Any]], None] | None,
        begin: Callable[[str], None] | None = None,
    ) -> None:
        self._previous = previous
        self._keep = keep
        self._begin = begin

    def relayed(self, data: bytes) -> bytes:
        """Whole events of a stream. The response is kept before its last event goes out."""
        return _LIFECYCLE.sub(lambda match: match[1] + self._told(match[2], "response"), data)

    def answered(self, body: bytes) -> bytes:
        """The whole body of an answer."""
        return self._told(body)

    def _told(self, data: bytes, key: str = "") -> bytes:
        """JSON that is a response, or has it at a key, as it is to go out."""
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            return data
        response = document[key] if isinstance(document, dict) and key in document else document
        if not isinstance(response, dict) or response.get("object") != "response":
            return data
        if self._previous is not None:
            response["previous_response_id"] = self._previous
        if self._keep is not None and is_kept(response):
            self._keep(response)
        elif self._begin is not None and isinstance(response.get("id"), str):
            self._begin(response["id"])
            self._begin = None
        return data if self._previous is None else orjson.dumps(document)
