"""One engine's pins as its events report them. Its HTTP process and the balancer mirror them."""

from collections.abc import Mapping, Sequence
from typing import Any

PATH = "/v1/pins"
"""The path where engines and the balancer list pins."""


class PinMirror:
    """One engine's pins, by the hash of their prefix."""

    def __init__(self) -> None:
        self._pins: dict[str, tuple[dict[str, Any], float]] = {}  # rows and their deadlines

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    def clear(self) -> None:
        """Removes all pins, because the engine is gone."""
        self._pins.clear()

    def apply(self, line: Mapping[str, Any], now_s: float) -> None:
        """Applies one line of events, which may concern other things than pins."""
        if line.get("cleared"):
            self._pins.clear()
        for prefix in line.get("unpinned", ()):
            self._pins.pop(prefix, None)
        for row in line.get("pinned", ()):
            self._pins[row["prefix"]] = (row, now_s + row["left_s"])

    def rows(self, now_s: float, owner: str | None = None) -> list[dict[str, Any]]:
        """The pins, or those of one owner, as the engine reported them, with the seconds they have
        left now."""
        return [
            row | {"left_s": round(max(end_s - now_s, 0.0), 3)}
            for row, end_s in self._pins.values()
            if owner in (None, row.get("owner"))
        ]

    def tokens_of(self, segments: Sequence[int]) -> int:
        """How many tokens of a chain of segments are pinned."""
        names = {f"{segment:032x}" for segment in segments} if self._pins else set()
        rows = (row for row, _ in self._pins.values() if row["segment"] in names)
        return max((row["tokens"] for row in rows), default=0)

    def named(self, prefix: str | None, session: str | None, owner: str | None = None) -> list[str]:
        """The prefixes of the pins with this prefix, session and owner; None matches any."""
        wanted = {"prefix": prefix, "session": session, "owner": owner}.items()
        return [
            name
            for name, (row, _) in self._pins.items()
            if all(value in (None, row.get(key)) for key, value in wanted)
        ]
