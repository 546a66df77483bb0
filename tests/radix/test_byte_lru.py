"""The LRU cache that is bounded by bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix.byte_lru import ENTRY_BYTES, ByteLRU

LIMIT = 3 * (ENTRY_BYTES + 10)


def test_the_least_recently_used_is_evicted() -> None:
    cache = ByteLRU[str](LIMIT)
    for key in "abc":
        cache.add(key, key.upper(), 10)
    assert cache.get("a") == "A"
    cache.add("d", "D", 10)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]


def test_a_value_over_the_bound_evicts_nothing() -> None:
    cache = ByteLRU[str](LIMIT)
    cache.add("a", "A", 10)
    cache.add("b", "B", LIMIT)
    assert (cache.get("a"), cache.get("b")) == ("A", None)
    cache.clear()
    cache.check()
    assert (len(cache), cache.used_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, LIMIT))))
def test_the_bound_holds(added: list[tuple[int, int]]) -> None:
    cache = ByteLRU[int](LIMIT)
    for key, size in added:
        cache.add(key, key, size)
        cache.check()
        assert cache.get(key) in (key, None)
