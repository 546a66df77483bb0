"""A worker's response as it arrives: a stream in whole events, or a body collected to its end."""

import re

from sgl_ext.balancer.http.upstream import ResponseHead
from sgl_ext.reading.usage import Usage, read_items, read_usage

# The last events of OpenAI's and of Anthropic's streams, which carry no content.
_DONE = b"data: [DONE]\n\n"
_STOP = b"event: message_stop\n"
# Items of a stream of several prompts: SGLang numbers them at the end of each event.
_ITEM = re.compile(rb'"index":\s*(\d{1,9})\}\s*\Z')
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class Response:
    """The response to one attempt.

    lines: the header lines for the client.
    events_sent: how many events of a stream were sent to the client.
    """

    def __init__(self, head: ResponseHead, lines: bytes, *, sums_items: bool = False) -> None:
        """sums_items: whether its usage is that of all its items, and not of the last event."""
        self.head = head
        self.lines = lines
        self.events_sent = 0
        self._first_data = b""
        self._last_data = b""
        self._collected = bytearray()
        self._items: dict[bytes, bytes] | None = {} if sums_items else None

    def take(self, data: bytes) -> bytes:
        """Takes a part of the body. Returns the whole events that can be sent now, so that a stream
        that is cut ends with a complete event."""
        collected = self._collected
        if not self.head.streams:
            collected += data
            return b""
        if not collected and data.endswith(b"\n\n"):
            return data
        searched = max(0, len(collected) - 3)
        collected += data
        at, mark = max((collected.rfind(mark, searched), mark) for mark in _EVENT_ENDS)
        if at < 0:
            return b""
        whole = bytes(collected[: at + len(mark)])
        del collected[: at + len(mark)]
        return whole

    @property
    def first_data(self) -> bytes:
        """The first events, or the whole body, that were sent to the client."""
        return self._first_data

    @property
    def held_bytes(self) -> int:
        """The size of what is collected."""
        return len(self._collected)

    def end(self, last: bytes) -> bytes:
        """The last part has arrived. Returns the collected body, or what follows the last whole
        event that `take` returned of a stream."""
        collected = self._collected
        if not collected:
            return last
        collected += last
        return bytes(collected)

    def sent(self, data: bytes) -> None:
        """Records events, or a whole body, that are sent to the client."""
        if not self._first_data:
            self._first_data = data
        if data != _DONE and not data.startswith(_STOP):
            self._last_data = data
        if not self.head.streams:
            return
        self.events_sent += data.count(b"\n\n")
        if self._items is not None:
            for event in data.split(b"\n\n"):
                if (item := _ITEM.search(event)) is not None:
                    self._items[item[1]] = event

    def usage(self) -> Usage | None:
        """The usage that the answer states; None if it states none."""
        if self._items:
            return read_items(self._items.values())
        return read_usage(self._first_data, self._last_data)


NO_RESPONSE = Response(ResponseHead(0, b"", []), b"")
"""Stands for the response before there is one."""
