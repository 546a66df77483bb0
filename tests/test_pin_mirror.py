"""What is known of an engine's pins from its events."""

from __future__ import annotations

from typing import Any

from sgl_ext.pin_mirror import PinMirror

A, B, S = "a" * 32, "b" * 32, f"{7:032x}"


def pin(prefix: str, **told: Any) -> dict[str, Any]:
    known = {"prefix": prefix, "segment": S, "tokens": 100, "left_s": 300.0, "session": "s"}
    return known | told


def test_pins_are_added_changed_and_removed() -> None:
    mirror = PinMirror()
    mirror.apply({"pinned": [pin(A), pin(B, tokens=5)]}, 10.0)
    mirror.apply({"unpinned": [B, "unknown"]}, 20.0)
    assert mirror.rows(110.0) == [pin(A, left_s=200.0)]
    mirror.apply({"pinned": [pin(A, hits=1)]}, 110.0)
    assert mirror.rows(110.0) == [pin(A, hits=1)]
    assert mirror.rows(999.0)[0]["left_s"] == 0, "its end is still to be told"
    mirror.apply({"cleared": True}, 120.0)
    assert mirror.rows(120.0) == []


def test_a_prefix_that_is_unpinned_and_pinned_again_is_pinned() -> None:
    mirror = PinMirror()
    mirror.apply({"unpinned": [A], "pinned": [pin(A)]}, 0.0)
    assert A in mirror


def test_pins_are_found_by_prefix_and_by_session() -> None:
    mirror = PinMirror()
    mirror.apply({"pinned": [pin(A), pin(B, session="other")]}, 0.0)
    assert mirror.named(A, None) == [A]
    assert mirror.named(None, "other") == [B]
    assert mirror.named(A, "other") == []


def test_a_request_s_pinned_tokens_are_those_of_its_deepest_pin() -> None:
    mirror = PinMirror()
    assert mirror.tokens_of([7]) == 0
    mirror.apply({"pinned": [pin(A), pin(B, segment=f"{9:032x}", tokens=900)]}, 0.0)
    assert mirror.tokens_of([7, 8]) == 100
    assert mirror.tokens_of([7, 9]) == 900
    mirror.apply({"pinned": [pin("c" * 32, segment=None)]}, 0.0)
    assert mirror.tokens_of([8]) == 0
