"""Bounds the number of elements of a JSON body: each costs time and memory, however small it is.

Without a bound, 16 MB of one-letter blocks are four million objects to parse and segments to hash.
`find_many` looks at the bytes before they are parsed, and `find_excess` at the parsed fields.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from sgl_ext.limits.bounds import (
    MAX_BLOCKS,
    MAX_COMMAS,
    MAX_ELEMENTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    UNCOUNTED_BYTES,
)

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
