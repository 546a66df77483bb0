"""What was made of parts: the most recently used, within its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix.byte_lru import ENTRY_BYTES, Parts

LIMIT = 3 * (ENTRY_BYTES + 10)


def test_what_was_used_last_is_known_the_longest() -> None:
    parts = Parts[str](LIMIT)
    for key in "abc":
        parts.keep(key, key.upper(), 10)
    assert parts.find("a") == "A"
    parts.keep("d", "D", 10)
    assert [parts.find(key) for key in "abcd"] == ["A", None, "C", "D"]


def test_what_is_larger_than_the_bound_displaces_nothing() -> None:
    parts = Parts[str](LIMIT)
    parts.keep("a", "A", 10)
    parts.keep("b", "B", LIMIT)
    assert (parts.find("a"), parts.find("b")) == ("A", None)
    parts.clear()
    parts.check()
    assert (len(parts), parts.used_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, LIMIT))))
def test_the_bound_holds(kept: list[tuple[int, int]]) -> None:
    parts = Parts[int](LIMIT)
    for key, size in kept:
        parts.keep(key, key, size)
        parts.check()
        assert parts.find(key) in (key, None)
