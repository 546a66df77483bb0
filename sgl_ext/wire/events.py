"""What an engine holds and how busy it is, as lines of JSON that tell of each change.

    scheduler --ZMQ--> its HTTP process --GET /sgl_ext/events--> balancers, and any other reader

    {"seq":0,"snapshot":true,"cleared":true,"publishes":["prefixes","load"],"load":{...}}
    {"seq":1,"stored":[["4b00...",null,5120],["9c1f...","4b00...",5391]]}
    {"seq":2,"complete":true}

docs/reference/events.md explains each field. A scheduler writes a `Line`, and its HTTP process
sends it on as it is, with a number in front that counts the lines of each connection. A balancer
reads a line as an `Event`: unknown fields are ignored, and a field of the wrong type makes the
whole line malformed, so that the balancer begins again with a snapshot.
"""

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import ne
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
import orjson

from radix.residency_changes import Changes, Stored

EVENTS_PATH = "/sgl_ext/events"
SUBSCRIBERS_PATH = "/sgl_ext/events/subscribers"
"""Where an engine answers how many readers its streams have, as `Subscribers`."""
PREFIXES, LOAD = "prefixes", "load"
"""Of what an engine publishes: the prefixes that it holds, and its load."""
LINE_SEGMENTS = 1000

_HEX = re.compile(r"[0-9a-f]*\Z")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Reasons = Annotated[dict[str, _Count], msgspec.Meta(max_length=64)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
# Its digits are checked for a whole line at once, which is faster.
_Segment = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]


class EngineLoad(TypedDict, total=False):
    """A scheduler's load: requests, and tokens of prompts and of memory.

    pending_tokens: of prompts still to prefill. max_running: how many requests can run at once.
    context_tokens: the longest prompt and answer together. prefill_tokens, prefill_ms: what was
    computed since the start, and how long it took. pin_budget_tokens: how many tokens pins may have
    together. pins_declined: the marks that got no pin since the start, by the reason.
    host_capacity_tokens: of an engine with a host tier.
    """

    running: _Count
    queued: _Count
    pending_tokens: _Count
    used_tokens: _Count
    pinned_tokens: _Count
    pin_budget_tokens: _Count
    pins_declined: _Reasons
    capacity_tokens: _Count
    max_running: _Count
    context_tokens: _Count
    prefill_tokens: _Count
    prefill_ms: _Count
    host_capacity_tokens: _Count


StoredRow = tuple[str, str | None, int] | list[Any]
"""A segment that is held, the one before it in the prompt, and the tokens up to its end."""


class PinRow(TypedDict):
    """A pin. prefix: its hash. segment: the deepest at or before its end. left_s: how long it lasts
    unless a request reads it."""

    prefix: str
    segment: str | None
    tokens: int
    ttl_s: float
    left_s: float
    tier: str
    hits: int
    owner: str
    session: str


class Line(TypedDict, total=False):
    """A line as it is written, without its number. Its fields are those of `StoringEvent`.

    The HTTP process does not send on:

    shared_pages: where the shared tier has its pages.
    tiers_off: tiers that are off, with the reason. The HTTP process adds them to `caches_off`.
    stored_all: an engine that ends has stored what it holds in the shared tier.
    """

    snapshot: bool
    cleared: bool
    alive: bool
    complete: bool
    publishes: list[str]
    machine: str
    shared_pages: str
    shared_cleared: bool
    removed: list[str]
    stored: Sequence[StoredRow]
    host_removed: list[str]
    host: Sequence[StoredRow]
    shared_removed: list[str]
    shared: Sequence[StoredRow]
    unpinned: list[str]
    pinned: Sequence[Any]
    load: EngineLoad
    load_share: float
    shared_share: float
    caches_off: list[str]
    tiers_off: list[str]
    stored_all: bool
    degraded: Sequence[str]


# Writing


def name_of(segment: int) -> str:
    """A segment's hash as its 32 digits."""
    return f"{segment:032x}"


def lines_of(changes: Changes) -> list[Line]:
    """What changed in a cache, as lines."""
    lines = [*stored_lines(changes.stored), *stored_lines(changes.host, "host")] or [Line()]
    first: Line = {"cleared": True} if changes.cleared else {}
    if changes.removed:
        first["removed"] = [*map(name_of, changes.removed)]
    if changes.host_removed:
        first["host_removed"] = [*map(name_of, changes.host_removed)]
    lines[0] = first | lines[0]
    return lines


def stored_lines(stored: Iterable[Stored], tier: str = "stored") -> Iterator[Line]:
    """Segments that are stored, as lines of at most LINE_SEGMENTS each. tier: "stored", "host" or
    "shared"."""
    left = iter(stored)
    while some := list(islice(left, LINE_SEGMENTS)):
        rows = [
            [f"{segment:032x}", None if parent is None else f"{parent:032x}", tokens]
            for segment, parent, tokens in some
        ]
        yield {tier: rows}  # type: ignore[misc]


def pin_row(pin: Any, now_s: float) -> PinRow:
    """A pin of `radix.pins` as it is published."""
    segment = pin.label.segment
    return {
        "prefix": pin.prefix,
        "segment": None if segment is None else name_of(segment),
        "tokens": pin.tokens,
        "ttl_s": pin.ttl_s,
        "left_s": round(max(pin.deadline_s - now_s, 0.0), 3),
        "tier": pin.label.tier,
        "hits": pin.hits,
        "owner": pin.owner,
        "session": pin.session,
    }


def encode(line: Line) -> bytes:
    """A line's bytes, without its number and without a line end."""
    return orjson.dumps(line)


def numbered(line: bytes, number: int) -> bytes:
    """An encoded line as it is sent to a reader."""
    return b'{"seq":%d,%b\n' % (number, line[1:])


# Reading


class MalformedEvent(ValueError):
    """A line that is no event."""


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `StoredRow`, checked."""

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
    """What a reader needs of a `PinRow`."""

    prefix: _Segment
    segment: _Segment | None
    tokens: _Count
    left_s: float
    session: str
    tier: str = "device"


class Event(msgspec.Struct):
    """One line, without what is stored.

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
    load: EngineLoad | None = None
    load_share: _Share | None = None
    shared_share: _Share | None = None
    caches_off: list[str] | None = None
    degraded: list[str] = []


class StoringEvent(Event):
    """A line with what is stored, which most of a line is about, and with the slower tiers."""

    stored: list[Row] = []
    host: list[Row] = []
    host_removed: list[_Segment] = []
    shared: list[Row] = []
    shared_removed: list[_Segment] = []


NO_ROWS = Rows((), array("Q"), (), (), ())
_DECODER = msgspec.json.Decoder(Event)
_STORING_DECODER = msgspec.json.Decoder(StoringEvent)


def read_event(line: bytes, *, with_stored: bool) -> tuple[Event, Rows]:
    """Reads a line; what it stores on the device also as columns. Raises MalformedEvent.

    with_stored: whether to read what is stored. Otherwise that is skipped, which takes less time.
    """
    decoder: msgspec.json.Decoder[Any] = _STORING_DECODER if with_stored else _DECODER
    try:
        event: Event = decoder.decode(line)
        pins = msgspec.convert(event.pinned, list[_Pin])
    except msgspec.MsgspecError as error:
        raise MalformedEvent(str(error)) from None
    names = event.removed + event.unpinned
    stored = NO_ROWS
    if isinstance(event, StoringEvent):
        names += event.host_removed + event.shared_removed
        stored = _columns(event.stored)
        for rows in (stored, _columns(event.host), _columns(event.shared)):
            names += [rows.parents[place] or "" for place in rows.begins]
    for pin in pins:
        names += (pin.prefix, pin.segment or "")
    if _HEX.match("".join(names)) is None:
        raise MalformedEvent("a segment is not of small hexadecimal digits")
    return event, stored


def runs_of(rows: Rows) -> Iterator[tuple[int, int]]:
    """The first place of each run, and the place after its last. In a run each segment is the
    parent of the next. Most of a line is few such runs."""
    return pairwise((*rows.begins, len(rows.segments)))


def _columns(rows: Sequence[Row]) -> Rows:
    if not rows:
        return NO_ROWS
    segments = [row.segment for row in rows]
    parents = [row.parent for row in rows]
    breaks = map(ne, parents[1:], segments)
    begins = [0, *(place for place, is_break in enumerate(breaks, 1) if is_break)]
    if any(parents[place] == segments[place] for place in begins):
        raise MalformedEvent("a segment is its own parent")
    tokens = [row.tokens for row in rows]
    return Rows(segments, _halves_of("".join(segments)), parents, tokens, begins)


def _halves_of(digits: str) -> "array[int]":
    """Reads hex digits, 16 for a half. It takes less time than `_HEX`."""
    try:
        numbers = bytes.fromhex(digits)
    except ValueError:
        raise MalformedEvent("a segment is not of hexadecimal digits") from None
    if 2 * len(numbers) != len(digits) or digits != digits.lower():  # blanks, capitals
        raise MalformedEvent("a segment is not of small hexadecimal digits")
    halves = array("Q", numbers)
    if sys.byteorder == "little":
        halves.byteswap()
    return halves


# Beside the stream


class Subscribers(msgspec.Struct):
    """How many readers the streams of an engine have. A balancer reads an engine that drains until
    the last answer has come: with 0 it may end."""

    subscribers: int


def read_subscribers(answer: bytes) -> int:
    """Raises ValueError for another answer."""
    return msgspec.json.decode(answer, type=Subscribers).subscribers
