"""An engine's prefix events: each line is checked and applied to the index.

A malformed line changes nothing. After it, or after a gap, the subscriber must connect again and
begin with a snapshot.
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
    """Why a line, or a part of it, was not applied."""

    MALFORMED = "malformed"
    GAP = "gap"
    REPEATED = "repeated"
    ORPHAN = "orphan"


class EventStreamBroken(Exception):
    """The stream cannot continue: connect again and begin with a snapshot."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class PrefixEventReader:
    """Applies the events of one connection to one worker, in order.

    from_scheduler: whether the engine's scheduler, and not its HTTP process, sent the last line.
    load: the last reported load.
    orphans, repeated: how many segments and lines were not applied.
    """

    def __init__(
        self, worker: int, index: PrefixIndex, in_flight: InFlightPrefixes, pins: PinMirror
    ) -> None:
        self._worker = worker
        self._pins = pins
        self._index = index
        self._in_flight = in_flight
        self._seq: int | None = None
        self.orphans = 0
        self.repeated = 0
        self.load: dict[str, int] | None = None
        self.from_scheduler = False

    def apply(self, line: bytes, now_s: float) -> None:
        """Applies one line, received at `now_s`.

        Raises EventStreamBroken if it is malformed or if lines before it are missing.
        """
        seq, event = _parse(line)
        if self._seq is None:
            if event.get("snapshot") is not True:
                raise EventStreamBroken(Fault.GAP)
        elif seq <= self._seq:
            self.repeated += 1
            return
        elif seq != self._seq + 1:
            raise EventStreamBroken(Fault.GAP)
        self._seq = seq
        self.from_scheduler = not event.get("alive")
        if event.get("cleared"):
            self._index.clear(self._worker)
            if not event.get("snapshot"):
                self._in_flight.forget_worker(self._worker)
        for segment in event.get("removed", ()):
            number = int(segment, 16)
            self._index.remove(self._worker, number)
            self._in_flight.forget_segment(self._worker, number)
        for segment, parent, tokens in event.get("stored", ()):
            above = None if parent is None else int(parent, 16)
            number = int(segment, 16)
            if self._index.store(self._worker, above, number, tokens):
                self._in_flight.confirm(self._worker, number)
            else:
                self.orphans += 1
        self._pins.apply(event, now_s)
        if (load := event.get("load")) is not None:
            self.load = load


def _parse(line: bytes) -> tuple[int, dict[str, Any]]:
    """The line's sequence number and content. Raises EventStreamBroken on a wrong type."""
    try:
        event = orjson.loads(line)
        is_valid = (
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
    if not is_valid:
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
