"""The tools that conversations offered last, within their bounds."""

from __future__ import annotations

from typing import Any

from sgl_ext.engine.host_cache.offered_tools import LIMIT_BYTES, MOST_CONVERSATIONS, OfferedTools
from sgl_ext.reading.segments import Chain


def head(number: int) -> Chain:
    return Chain((number,), (1,), head_segments=1)


def tools_of(name: str, characters: int = 0) -> list[dict[str, Any]]:
    return [{"name": name, "description": "d" * characters}]


def test_a_conversation_has_its_last_tools() -> None:
    offered = OfferedTools()
    assert offered.last("a") == []
    offered.note("a", head(1), tools_of("look"))
    assert offered.last("a") == tools_of("look")
    offered.note("a", head(2), tools_of("write"))
    assert offered.last("a") == tools_of("write")
    assert offered.last("b") == []


def test_equal_tools_are_stored_once() -> None:
    offered = OfferedTools()
    offered.note("0", head(0), tools_of("look", 10_000))
    used = offered.used_bytes
    for number in range(1, 50):
        offered.note(f"{number}", head(number), tools_of("look", 10_000))
    assert offered.used_bytes == used > 10_000


def test_what_is_stored_is_bounded() -> None:
    offered = OfferedTools()
    for number in range(40):
        offered.note(f"{number}", head(number), tools_of(f"{number}", LIMIT_BYTES // 20))
    assert offered.used_bytes <= offered.limit_bytes == LIMIT_BYTES
    assert offered.last("0") == []
    assert offered.last("39") == tools_of("39", LIMIT_BYTES // 20)
    for number in range(MOST_CONVERSATIONS):
        offered.note(f"more {number}", head(number), tools_of("look"))
    assert offered.last("39") == []
    # A conversation whose tools were displaced has them again with its next turn.
    offered.note("0", head(0), tools_of("0"))
    assert offered.last("0") == tools_of("0")
