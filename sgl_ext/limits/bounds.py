"""The fixed bounds of one connection and one request. docs/reference/limits.md lists all bounds.

Those that depend on a node's memory are settings (`sgl_ext/settings/schema.py`).

The number of elements of a JSON body is bounded, as each costs time and memory, however small it
is. Without a bound, 16 MB of one-letter blocks are four million objects to parse and segments to
hash. `find_many` looks at the bytes before they are parsed, and `find_excess` at the parsed fields.

`deep_field` finds a field that is nested deeper than engines can process. SGLang checks the schemas
of tools, and sends tools and metadata back in some answers. Both fail inside the server for values
that are nested as deep as a parser still accepts.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

_KIB, _MIB = 1 << 10, 1 << 20

# Bytes.
MAX_HEAD_BYTES = 64 * _KIB
MAX_AHEAD_BYTES = 64 * _KIB
"""Of later requests, while an earlier one is answered; then the connection is not read."""
MAX_BODILESS_BYTES = 8 * _KIB
"""A body with a method that needs none, such as GET."""
MAX_SKIPPED_BYTES = _MIB
"""Of a rejected request's body; with a longer one the connection ends."""
FIRST_BUFFER_BYTES = 256 * _KIB
BUFFER_GROWTH = 4
"""A body's buffer at first, and how many times as large it is after it was full."""
MAX_GROWTH_BYTES = 8 * _MIB
"""At once: the new part is filled with zeros while the event loop waits."""
MAX_WRITTEN_BYTES = _MIB
"""Of a body, to a worker in one round of the event loop."""
MAX_RATIO = 100
FREE_INFLATED_BYTES = _MIB
"""A body may inflate to this, and to MAX_RATIO times its compressed size above it."""
INFLATED_STEP_BYTES = 64 * _KIB
"""A body inflates by this much at most before it takes more of the byte budget."""
MAX_HANDSHAKE_BYTES = 16 * _KIB
"""From a client, until its TLS handshake is complete."""
MAX_HANDSHAKES = 1024
"""TLS handshakes in work in a process; the oldest leaves for a new one."""
BUDGET_BODIES = 4
"""How many of the largest bodies the byte budget holds, unless it is set."""
SOCKET_TURNS_BYTES = 16 * _MIB
"""The turns that one WebSocket remembers."""

LARGE_BODY_BYTES = 2 * _MIB
"""A larger body is read in another process: here it could take more than 20 ms."""

# Elements of a JSON body.
UNCOUNTED_BYTES = _MIB // 2
"""Counting takes a third of the time of parsing, and a body of this size parses fast enough."""
MAX_ELEMENTS = 150_000
"""Objects, lists and strings, keys included."""
MAX_COMMAS = 1_200_000
"""Hence numbers: a prompt can be a list of token ids."""
MAX_MESSAGES = 10_000
MAX_BLOCKS = 10_000
"""Blocks of content in all messages, and of instructions."""
MAX_TOOLS = 2_000
MAX_SOCKET_MESSAGES = 16
"""Of one WebSocket, answered or waiting; then it is not read."""
MAX_LANES = 32
"""Of one WebSocket, whose latest response is remembered."""

# Seconds.
IDLE_S = 75.0
HANDSHAKE_S = 10.0
HEAD_S = 30.0
UNREAD_S = 120.0
"""A client that reads nothing of its answer for this long counts as disconnected."""
LINGER_S = 2.0
BODY_GRACE_S = 60.0
MIN_BODY_BYTES_PER_S = 8 * _KIB
MAX_BODY_S = 600.0
SOCKET_IDLE_S = 3600.0
"""A WebSocket without a message for this long ends."""
SOCKET_PING_S = 30.0
READING_S = 30.0
"""For a large body, and those that wait before it; the largest takes half a second."""


def body_deadline_s(arrived_bytes: int) -> float:
    """How long after its head a body may be incomplete, if this much of it has arrived."""
    return min(BODY_GRACE_S + arrived_bytes / MIN_BODY_BYTES_PER_S, MAX_BODY_S)


_SLICE = 1 << 16
_NO_SIGNS = bytes(set(range(256)) - set(b'[{",'))


class Excess(NamedTuple):
    """A field that has too much; the message names the field and the limit."""

    field: str
    message: str


def find_many(*parts: bytes | bytearray) -> Excess | None:
    """Whether JSON texts over UNCOUNTED_BYTES have too many elements together."""
    if sum(map(len, parts)) <= UNCOUNTED_BYTES:
        return None
    # Most of a prompt is text without a sign of structure, so each count is tried that takes less
    # of it for structure and longer.
    for count in (_all_signs, _unescaped_signs):
        if _exceeds(map(count, _slices(part)) for part in parts) is None:
            return None
    return _exceeds(_outside_strings(part) for part in parts)


class _Signs(NamedTuple):
    """Signs of structure in a part of a JSON text: begins of objects and lists, quotes, commas."""

    begins: int = 0
    quotes: int = 0
    commas: int = 0


def _exceeds(counts: Iterable[Iterable[_Signs]]) -> Excess | None:
    """Adds up elements and commas until there are too many."""
    begins = quotes = commas = 0
    for more in chain.from_iterable(counts):
        begins += more.begins
        quotes += more.quotes
        commas += more.commas
        if begins + quotes // 2 > MAX_ELEMENTS:
            return Excess("body", f"body: more than {MAX_ELEMENTS} objects, lists and texts")
        if commas > MAX_COMMAS:
            return Excess("body", f"body: more than {MAX_COMMAS} values")
    return None


def _all_signs(text: bytes | bytearray) -> _Signs:
    signs = bytes(text).translate(None, _NO_SIGNS)  # faster than of a bytearray
    quotes, commas = signs.count(b'"'), signs.count(b",")
    return _Signs(len(signs) - quotes - commas, quotes, commas)


def _unescaped_signs(text: bytes | bytearray) -> _Signs:
    """Signs without quotes inside strings."""
    if b"\\\\" in text:
        text = text.replace(b"\\\\", b"")
    quotes = text.count(b'"') - text.count(b'\\"')
    return _Signs(text.count(b"[") + text.count(b"{"), quotes, text.count(b","))


def _slices(text: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """A JSON text in slices that cut no escape."""
    begin = 0
    while begin < len(text):
        piece = text[begin : begin + _SLICE]
        if len(piece) == _SLICE and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]
        begin += len(piece)
        yield piece


def _outside_strings(text: bytes | bytearray) -> Iterator[_Signs]:
    """The signs of each slice of a JSON text, without those inside strings."""
    in_string = False
    for piece in _slices(text):
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        yield _Signs(quotes=plain.count(b'"'))  # before they are split, which takes longer
        pieces = plain.split(b'"')
        structure = b"".join(pieces[in_string::2])
        begins = structure.count(b"{") + structure.count(b"[")
        yield _Signs(begins, commas=structure.count(b","))
        in_string ^= len(pieces) % 2 == 0


def find_excess(body: Any, turns_field: str | None, instructions: Iterable[str]) -> Excess | None:
    """The first field of a parsed body with too many messages, blocks or tools.

    turns_field: the field with the messages; None if the protocol has none.
    instructions: the fields with blocks of instructions.
    """
    if not isinstance(body, dict):
        return None
    if _count(body.get("tools")) > MAX_TOOLS:
        return Excess("tools", f"tools: more than {MAX_TOOLS}")
    messages = None if turns_field is None else body.get(turns_field)
    if _count(messages) > MAX_MESSAGES:
        return Excess(str(turns_field), f"{turns_field}: more than {MAX_MESSAGES}")
    for field in instructions:
        if _count(body.get(field)) > MAX_BLOCKS:
            return Excess(field, f"{field}: more than {MAX_BLOCKS} blocks")
    contents = values_of(messages, "content") if isinstance(messages, list) else []
    blocks = sum([len(content) for content in contents if type(content) is list])
    if blocks > MAX_BLOCKS:
        return Excess(str(turns_field), f"{turns_field}: more than {MAX_BLOCKS} blocks of content")
    return None


def values_of(items: list[Any], field: str) -> list[Any]:
    """A field of each item; None for an item without it, and for one that is no object."""
    try:
        return [*map(itemgetter(field), items)]
    except (KeyError, TypeError):
        return [item.get(field) if isinstance(item, dict) else None for item in items]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


LIMIT_LEVELS = 246
"""What orjson writes, less the levels of an answer around a field."""
_LEVELS_OF_ORJSON = 254
_AROUND = _LEVELS_OF_ORJSON - LIMIT_LEVELS


def deep_field(body: Any, turns_field: str | None) -> str | None:
    """The first field with more than LIMIT_LEVELS levels; None if there is none.

    turns_field: the messages, which are left out: they are most of a body, and SGLang rejects what
    it does not know in them.
    """
    if not isinstance(body, dict):
        return None
    for name, value in body.items():
        is_nested = isinstance(value, (dict, list)) and name != turns_field
        if is_nested and is_deep(value):
            return str(name)
    return None


def is_deep(value: Any) -> bool:
    """Whether a parsed value has more than LIMIT_LEVELS levels."""
    for _ in range(_AROUND):
        value = (value,)
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False
