"""Bounds the number of elements of a JSON body: each costs time and memory, however small it is.

Without a bound, 16 MB of one-letter blocks are four million objects to parse and segments to hash.
`find_many` looks at the bytes before they are parsed, and `find_excess` at the parsed fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sgl_ext.limits.bounds import (
    MAX_BLOCKS,
    MAX_COMMAS,
    MAX_ELEMENTS,
    MAX_MESSAGES,
    MAX_TOOLS,
)

_SLICE = 1 << 20


class Excess(NamedTuple):
    """A field that has too much; the message names the field and the limit."""

    field: str
    message: str


def find_many(*parts: bytes | bytearray) -> Excess | None:
    """Whether JSON texts have too many elements together. Small ones cannot, and are not read."""
    if sum(map(len, parts)) < MAX_ELEMENTS:
        return None
    # First a count that takes every sign for structure; most of a prompt is text without any.
    quotes, commas, lists, objects = (
        sum(part.count(sign) for part in parts) for sign in (b'"', b",", b"[", b"{")
    )
    if quotes // 2 + lists + objects <= MAX_ELEMENTS and commas <= MAX_COMMAS:
        return None
    elements = commas = 0
    for part in parts:
        for more_elements, more_commas in _outside_strings(part):
            elements += more_elements
            commas += more_commas
            if elements > MAX_ELEMENTS:
                return Excess("body", f"body: more than {MAX_ELEMENTS} objects, lists and texts")
            if commas > MAX_COMMAS:
                return Excess("body", f"body: more than {MAX_COMMAS} values")
    return None


def _outside_strings(text: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """The elements and the commas of each slice of a JSON text, without those inside strings."""
    begin, in_string = 0, False
    while begin < len(text):
        end = begin + _SLICE
        piece = text[begin:end]
        if end < len(text) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end, piece = end - 1, piece[:-1]  # the escape is not cut
        pieces = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        structure = b"".join(pieces[in_string::2])
        yield (
            structure.count(b"{") + structure.count(b"[") + len(pieces) // 2,
            structure.count(b","),
        )
        in_string ^= len(pieces) % 2 == 0
        begin = end


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
    blocks = 0
    for message in messages if isinstance(messages, list) else ():
        if type(message) is dict and type(content := message.get("content")) is list:
            blocks += len(content)
    if blocks > MAX_BLOCKS:
        return Excess(str(turns_field), f"{turns_field}: more than {MAX_BLOCKS} blocks of content")
    return None


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0
