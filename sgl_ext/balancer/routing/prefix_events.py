"""What an engine says it holds, line by line: checked, and applied to the index.

A line that is not what the engine's events promise changes nothing: it is told
apart from a gap, after which the feed must begin again with a snapshot.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import orjson

from radix.in_flight_prefixes import InFlightPrefixes
from radix.index import PrefixIndex
from sgl_ext.pin_mirror import PinMirror

_SEGMENT = re.compile(r"[0-9a-f]{32}\Z")
_LOADS = (
    "running",
    "queued",
    "max_running",
    "pending_tokens",
    "used_tokens",
    "pinned_tokens",
    "capacity_tokens",
)
_MOST_TOKENS = 1 << 40


class Fault(StrEnum):
    """Why a line was not applied, or not wholly."""

    MALFORMED = "malformed"
    GAP = "gap"
    REPEATED = "repeated"
    ORPHAN = "orphan"


class EventStreamBroken(Exception):
    """The feed cannot go on: connect again and begin with a snapshot. Names the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class PrefixEventReader:
    """One connection's events of one worker, applied in order.

    `told` is whether the last line was a word of the engine's scheduler, `load` the load
    it told; `orphans` and `repeated` count what was not applied.
    """

    def __init__(
        self, worker: int, index: PrefixIndex, expected: InFlightPrefixes, pins: PinMirror
    ) -> None:
        self._worker = worker
        self._pins = pins
        self._index = index
        self._expected = expected
        self._seq: int | None = None
        self.orphans = 0
        self.repeated = 0
        self.load: dict[str, int] | None = None
        self.told = False

    def apply(self, line: bytes, now_s: float) -> None:
        """Applies one line, heard at `now_s`.

        Raises EventStreamBroken if it is malformed or lines before it are missing.
        """
        seq, event = _checked(line)
        if self._seq is None:
            if event.get("snapshot") is not True:
                raise EventStreamBroken(Fault.GAP)
        elif seq <= self._seq:
            self.repeated += 1
            return
        elif seq != self._seq + 1:
            raise EventStreamBroken(Fault.GAP)
        self._seq = seq
        # A line that is only there to be heard comes from the HTTP process, not from the scheduler.
        self.told = not event.get("alive")
        if event.get("cleared"):
            self._index.clear(self._worker)
            if not event.get("snapshot"):
                self._expected.forget_worker(self._worker)
        for segment in event.get("removed", ()):
            number = int(segment, 16)
            self._index.remove(self._worker, number)
            self._expected.forget_segment(self._worker, number)
        for segment, parent, tokens in event.get("stored", ()):
            above = None if parent is None else int(parent, 16)
            number = int(segment, 16)
            if self._index.store(self._worker, above, number, tokens):
                self._expected.confirm(self._worker, number)
            else:
                self.orphans += 1
        self._pins.apply(event, now_s)
        if (load := event.get("load")) is not None:
            self.load = load


def _checked(line: bytes) -> tuple[int, dict[str, Any]]:
    """The line's number and content, every part of it of its type."""
    try:
        event = orjson.loads(line)
        right = (
            _is_count(event["seq"])
            and all(_is_segment(segment) for segment in event.get("removed", ()))
            and all(
                _is_segment(segment)
                and (parent is None or _is_segment(parent))
                and segment != parent
                and _is_count(tokens)
                for segment, parent, tokens in event.get("stored", ())
            )
            and all(_is_segment(prefix) for prefix in event.get("unpinned", ()))
            and all(_is_pin(row) for row in event.get("pinned", ()))
            and _is_load(event.get("load"))
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise EventStreamBroken(Fault.MALFORMED) from None
    if not right:
        raise EventStreamBroken(Fault.MALFORMED)
    return event["seq"], event


def _is_segment(value: Any) -> bool:
    return isinstance(value, str) and _SEGMENT.match(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_TOKENS


def _is_pin(row: Any) -> bool:
    segment = row["segment"]
    return (
        _is_segment(row["prefix"])
        and (segment is None or _is_segment(segment))
        and _is_count(row["tokens"])
        and isinstance(row["left_s"], int | float)
        and isinstance(row["session"], str)
    )


def _is_load(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(_is_count(value.get(key, 0)) for key in _LOADS)
    )
