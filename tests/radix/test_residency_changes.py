"""What was published of the segments of a shared tier, and what must be sent next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix.index import PrefixIndex
from radix.residency_changes import SharedSegments, Stored

# Segment n has the parent n // 2: 1 begins prompts, and 0 is no segment.
_THERE = st.sets(st.integers(1, 31))


def rows(segments: set[int], tokens: int = 100) -> dict[int, Stored]:
    return {n: (n, n // 2 or None, tokens * n.bit_length()) for n in segments}


def usable(segments: set[int]) -> set[int]:
    """Those that are there with all that is above them."""
    above = {n: {n >> shift for shift in range(n.bit_length())} for n in segments}
    return {n for n in segments if above[n] <= segments}


@given(steps=st.lists(st.tuples(_THERE, st.sampled_from([100, 200])), max_size=8))
def test_a_reader_has_what_is_there_with_its_beginning(steps: list[tuple[set[int], int]]) -> None:
    published, reader = SharedSegments(), PrefixIndex()
    for there, tokens in steps:
        changes = published.update(rows(there, tokens))
        for segment in changes.removed:
            assert reader.remove(0, segment), "each is removed once"
        for segment, parent, count in changes.stored:
            assert reader.store(0, parent, segment, count), "parents come first"
        held = {segment: (parent, count) for parent, segment, count in reader.snapshot(0)}
        expected = {n: row[1:] for n, row in rows(usable(there), tokens).items()}
        assert held == expected
        assert len(published) == len(expected)
        assert published.update(rows(there, tokens)) == ([], []), "nothing is sent twice"


def test_segments_in_a_circle_are_left_out() -> None:
    published = SharedSegments()
    assert published.update({1: (1, 2, 5), 2: (2, 1, 5), 3: (3, None, 5)}).stored == [(3, None, 5)]
