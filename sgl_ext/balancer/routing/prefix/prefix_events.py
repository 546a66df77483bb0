"""An engine's prefix events: each line is checked and applied to the index.

A malformed line changes nothing. After it, or after a gap, the subscriber must connect again and
begin with a snapshot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from radix.in_flight_prefixes import InFlightPrefixes
from radix.index import PrefixIndex
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.wire.events import Event, MalformedEvent, Rows, StoringEvent, read_event, runs_of


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
        try:
            event, stored = read_event(line, with_stored=self.index is not None)
        except MalformedEvent:
            raise EventStreamBroken(Fault.MALFORMED) from None
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
        segments, halves, parents, tokens, _ = rows
        for begin, end in runs_of(rows):
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
