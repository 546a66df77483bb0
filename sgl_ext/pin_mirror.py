"""What an engine's events tell of its pins, for whoever reads them: its own HTTP process, the
balancer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PATH = "/v1/pins"
"""Where engines and the balancer show them."""


class PinMirror:
    """One engine's pins, by the hash of their prefix."""

    def __init__(self) -> None:
        self._pins: dict[str, tuple[dict[str, Any], float]] = {}  # rows, and when they end

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._pins

    def clear(self) -> None:
        """The engine is gone, or holds nothing any more."""
        self._pins.clear()

    def apply(self, line: Mapping[str, Any], now_s: float) -> None:
        """Takes one line of events, whatever it tells."""
        if line.get("cleared"):
            self._pins.clear()
        for prefix in line.get("unpinned", ()):
            self._pins.pop(prefix, None)
        for row in line.get("pinned", ()):
            self._pins[row["prefix"]] = (row, now_s + row["left_s"])

    def rows(self, now_s: float, owner: str | None = None) -> list[dict[str, Any]]:
        """Every pin, or every one of an owner's, as the engine told it, and the seconds it has
        left as of now."""
        return [
            row | {"left_s": round(max(end_s - now_s, 0.0), 3)}
            for row, end_s in self._pins.values()
            if owner is None or row.get("owner") == owner
        ]

    def tokens_of(self, segments: Sequence[int]) -> int:
        """How many tokens of a chain of segments are pinned here."""
        asked = {f"{segment:032x}" for segment in segments} if self._pins else set()
        rows = (row for row, _ in self._pins.values() if row["segment"] in asked)
        return max((row["tokens"] for row in rows), default=0)

    def named(self, prefix: str | None, session: str | None, owner: str | None = None) -> list[str]:
        """The pins of this prefix, session and owner; None: of any."""
        return [
            row["prefix"]
            for row, _ in self._pins.values()
            if prefix in (None, row["prefix"])
            and session in (None, row["session"])
            and (owner is None or row.get("owner") == owner)
        ]
