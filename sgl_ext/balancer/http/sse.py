"""Splits server-sent events, so that a stream that is cut ends with a complete event."""

from __future__ import annotations

_ENDS = (b"\n\n", b"\r\n\r\n")


class WholeEvents:
    """Buffers the last event of a stream until it is complete."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, data: bytes) -> bytes:
        """Everything up to the end of the last complete event; empty if no event ended."""
        if not self._rest and data.endswith(b"\n\n"):
            return data
        searched = max(0, len(self._rest) - 3)
        self._rest += data
        found = max((self._rest.rfind(mark, searched), mark) for mark in _ENDS)
        if found[0] < 0:
            return b""
        end = found[0] + len(found[1])
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        return whole

    def rest(self) -> bytes:
        """The incomplete event at the end of the stream."""
        return bytes(self._rest)
