"""An engine's prefix events: each line is checked and applied to the index.

A malformed line changes nothing. After it, or after a gap, the subscriber must connect again and
begin with a snapshot.
"""

import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from operator import ne
from typing import Annotated, Any, NamedTuple

import msgspec

from radix.in_flight_prefixes import InFlightPrefixes
from radix.index import PrefixIndex
from sgl_ext.pin_mirror import PinMirror

_HEX = re.compile(r"[0-9a-f]*\Z")
# `_parse` matches the digits of a whole line at once, which is faster.
_Segment = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A segment that is held, the one before it in the prompt, and the tokens up to its end."""

    segment: _Segment
    parent: _Segment | None
    tokens: _Count


class Rows(NamedTuple):
    """The columns of rows, and the places where a row's parent is not the row before it.

    halves: of each segment, the highest and the lowest 64 bits.
    """

    segments: Sequence[str]
    halves: "array[int]"
    parents: Sequence[str | None]
    tokens: Sequence[int]
    begins: Sequence[int]


class _Pin(msgspec.Struct):
    prefix: _Segment
    segment: _Segment | None
    tokens: _Count
    left_s: float
    session: str
    tier: str = "device"


class Event(msgspec.Struct):
    """One line.

    alive: the engine's HTTP process sent it, and not its scheduler.
    complete: the snapshot ends with this line.
    publishes: what the engine publishes from now on: "prefixes", "host", "load".
    machine: the one whose shared tier `shared` is about; "" as before.
    shared_cleared: from here on the engine publishes that tier for all, beginning
        with nothing.
    load_share, shared_share: what a token costs that the engine loads from its host or from the
        shared tier, as a share of one that it computes; None: as before.
    caches_off: the caches of its HTTP process that are off now; None: as before.
    degraded: with a snapshot, the features of SGLang with which the engine does less.
    """

    seq: _Count
    snapshot: Any = None
    cleared: Any = None
    alive: Any = None
    complete: Any = None
    publishes: list[str] | None = None
    machine: Annotated[str, msgspec.Meta(max_length=128)] = ""
    shared_cleared: Any = None
    removed: list[_Segment] = []
    unpinned: list[_Segment] = []
    pinned: list[dict[str, Any]] = []
    load: dict[str, _Count] | None = None
    load_share: _Share | None = None
    shared_share: _Share | None = None
    caches_off: list[str] | None = None
    degraded: list[str] = []


class StoringEvent(Event):
    """A line with what was stored, which most of a line is about, and with the slower tiers."""

    stored: list[Row] = []
    host: list[Row] = []
    host_removed: list[_Segment] = []
    shared: list[Row] = []
    shared_removed: list[_Segment] = []


_NO_ROWS = Rows((), array("Q"), (), (), ())
_DECODER = msgspec.json.Decoder(Event)
_STORING_DECODER = msgspec.json.Decoder(StoringEvent)


class Fault(StrEnum):
    """Why a line, or a part of it, was not applied."""

    MALFORMED = "malformed"
    GAP = "gap"
    REPEATED = "repeated"
    ORPHAN = "orphan"


class EventStreamBroken(Exception):
    """The stream cannot continue: connect again and begin with a snapshot. Its text is a Fault."""


Tiers = tuple[int | None, int | None]
"""The slots of a worker's host and of its machine's shared tier, if it has them."""


def _no_tiers(event: Event) -> Tiers:
    return None, None


@dataclass(slots=True, eq=False)
class PrefixEventReader:
    """Applies the events of one connection to one worker, in order.

    index: None if another process writes the index; then what was stored is not even parsed.
    find_tiers: the slots of the slower tiers that a line announces.
    orphans, repeated: how many segments and lines were not applied.
    """

    worker: int
    index: PrefixIndex | None
    in_flight: InFlightPrefixes
    pins: PinMirror
    find_tiers: Callable[[Event], Tiers] = _no_tiers
    orphans: int = 0
    repeated: int = 0
    _seq: int | None = None
    _tiers: Tiers = (None, None)

    def apply(self, line: bytes, now_s: float) -> Event:
        """Applies one line, received at `now_s`. The load that it reports is left to the caller.

        Raises EventStreamBroken if it is malformed or if lines before it are missing.
        """
        event, stored = _parse(line, _DECODER if self.index is None else _STORING_DECODER)
        if self._seq is None:
            if event.snapshot is not True:
                raise EventStreamBroken(Fault.GAP)
        elif event.seq <= self._seq:
            self.repeated += 1
            return Event(event.seq, alive=True)
        elif event.seq != self._seq + 1:
            raise EventStreamBroken(Fault.GAP)
        self._seq = event.seq
        if event.publishes is not None or event.machine:
            self._tiers = self.find_tiers(event)
        if event.cleared:
            if self.index is not None:
                self.index.clear(self.worker)
                if (host := self._tiers[0]) is not None:
                    self.index.clear(host)
            if not event.snapshot:
                self.in_flight.forget_computed(self.worker)
        if event.shared_cleared and self.index is not None and self._tiers[1] is not None:
            self.index.clear(self._tiers[1])
        for segment in event.removed:
            number = int(segment, 16)
            if self.index is not None:
                self.index.remove(self.worker, number)
            self.in_flight.forget_segment(self.worker, number)
        if self.index is not None and isinstance(event, StoringEvent):
            self._store(self.index, stored)
            if event.host or event.host_removed or event.shared or event.shared_removed:
                self._store_tiers(self.index, event)
        self.pins.apply(msgspec.structs.asdict(event), now_s)
        return event

    def _store(self, index: PrefixIndex, rows: Rows) -> None:
        """Stores one run after the other of segments of which each is the parent of the next. Most
        of a line is few such runs, and together its segments take less time."""
        segments, halves, parents, tokens, begins = rows
        for begin, end in pairwise((*begins, len(segments))):
            parent = parents[begin]
            above = None if parent is None else int(parent, 16)
            own = halves[2 * begin : 2 * end]
            stored = index.store_chain(self.worker, above, own, tokens[begin:end])
            self.orphans += end - begin - stored
            if self.in_flight.expects(self.worker):
                for segment in segments[begin : begin + stored]:
                    self.in_flight.confirm(self.worker, int(segment, 16))

    def _store_tiers(self, index: PrefixIndex, event: StoringEvent) -> None:
        """A slower tier also has what is above a segment, or the device has it: lookups find both
        under the same slot."""
        tiers = (event.host_removed, event.host), (event.shared_removed, event.shared)
        for slot, (removed, stored) in zip(self._tiers, tiers, strict=True):
            if slot is None:
                self.orphans += len(stored)
                continue
            for segment in removed:
                index.remove(slot, int(segment, 16))
            for row in stored:
                above = None if row.parent is None else int(row.parent, 16)
                if above is not None:
                    index.extend(slot, above)
                if not index.store(slot, above, int(row.segment, 16), row.tokens):
                    self.orphans += 1


def _parse(line: bytes, decoder: msgspec.json.Decoder[Any]) -> tuple[Event, Rows]:
    """Decodes a line; what it stores as columns. Raises EventStreamBroken if a field has the wrong
    type."""
    try:
        event: Event = decoder.decode(line)
        pins = msgspec.convert(event.pinned, list[_Pin])
    except msgspec.MsgspecError:
        raise EventStreamBroken(Fault.MALFORMED) from None
    names = event.removed + event.unpinned
    stored = _NO_ROWS
    if isinstance(event, StoringEvent):
        names += event.host_removed + event.shared_removed
        stored = _columns(event.stored)
        for rows in (stored, _columns(event.host), _columns(event.shared)):
            names += [rows.parents[place] or "" for place in rows.begins]
    for pin in pins:
        names += (pin.prefix, pin.segment or "")
    if _HEX.match("".join(names)) is None:
        raise EventStreamBroken(Fault.MALFORMED)
    return event, stored


def _columns(rows: Sequence[Row]) -> Rows:
    if not rows:
        return _NO_ROWS
    segments = [row.segment for row in rows]
    parents = [row.parent for row in rows]
    breaks = map(ne, parents[1:], segments)
    begins = [0, *(place for place, is_break in enumerate(breaks, 1) if is_break)]
    if any(parents[place] == segments[place] for place in begins):
        raise EventStreamBroken(Fault.MALFORMED)
    tokens = [row.tokens for row in rows]
    return Rows(segments, _halves_of("".join(segments)), parents, tokens, begins)


def _halves_of(digits: str) -> "array[int]":
    """Reads hex digits, 16 for a half. It takes less time than `_HEX`."""
    try:
        numbers = bytes.fromhex(digits)
    except ValueError:
        raise EventStreamBroken(Fault.MALFORMED) from None
    if 2 * len(numbers) != len(digits) or digits != digits.lower():  # blanks, capitals
        raise EventStreamBroken(Fault.MALFORMED)
    halves = array("Q", numbers)
    if sys.byteorder == "little":
        halves.byteswap()
    return halves
