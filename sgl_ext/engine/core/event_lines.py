"""Prefix events as lines of the event stream, without their sequence numbers."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from radix.residency.changes import Changes, Stored

LINE_SEGMENTS = 1000


def lines_of(changes: Changes) -> list[dict[str, Any]]:
    """Changes as lines of the stream, without sequence numbers."""
    lines = [*stored_lines(changes.stored), *stored_lines(changes.host, "host")] or [{}]
    first: dict[str, Any] = {"cleared": True} if changes.cleared else {}
    for name, segments in (("removed", changes.removed), ("host_removed", changes.host_removed)):
        if segments:
            first[name] = [f"{segment:032x}" for segment in segments]
    lines[0] = first | lines[0]
    return lines


def stored_lines(stored: Iterable[Stored], name: str = "stored") -> Iterator[dict[str, Any]]:
    """Stored segments under this name, as lines of at most LINE_SEGMENTS each."""
    left = iter(stored)
    while some := list(islice(left, LINE_SEGMENTS)):
        yield {
            name: [
                [f"{segment:032x}", None if parent is None else f"{parent:032x}", tokens]
                for segment, parent, tokens in some
            ]
        }


def pin_row(pin: Any, now_s: float) -> dict[str, Any]:
    """A pin as it is published. `left_s`: how long it lasts unless a request reads it."""
    segment = pin.label.segment
    return {
        "prefix": pin.prefix,
        "segment": None if segment is None else f"{segment:032x}",
        "tokens": pin.tokens,
        "ttl_s": pin.ttl_s,
        "left_s": round(max(pin.deadline_s - now_s, 0.0), 3),
        "tier": pin.label.tier,
        "hits": pin.hits,
        "owner": pin.owner,
        "session": pin.session,
    }
