"""A worker's response as it arrives: a stream in whole events, or a body collected to its end."""

from __future__ import annotations

from sgl_ext.balancer.http.sse import WholeEvents

# The last events of OpenAI's and of Anthropic's streams, which carry no content.
_DONE = b"data: [DONE]\n\n"
_STOP = b"event: message_stop\n"


class Response:
    """The response to one attempt.

    first_data, last_data: the ends of the body as the client got it: the first and the last
        events with content of a stream, or the whole body twice.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.lines = b""
        self.streams = False
        self.first_data = b""
        self.last_data = b""
        self.events_sent = 0
        self._pieces: list[bytes] = []
        self._events: WholeEvents | None = None

    def take(self, data: bytes) -> bytes:
        """Takes a part of the body. Returns the whole events that can be sent now."""
        if not self.streams:
            self._pieces.append(data)
            return b""
        if self._events is None:
            if data.endswith(b"\n\n"):
                return data
            self._events = WholeEvents()
        return self._events.take(data)

    def rest(self) -> bytes:
        """What follows the last whole event of a stream that has ended."""
        return b"" if self._events is None else self._events.rest()

    def body(self) -> bytes:
        """The collected body of a response that does not stream."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def sent(self, data: bytes) -> None:
        """Records events that are sent to the client."""
        if not self.first_data:
            self.first_data = data
        if data != _DONE and not data.startswith(_STOP):
            self.last_data = data
        self.events_sent += data.count(b"\n\n")
