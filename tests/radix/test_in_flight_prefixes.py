"""In-flight prefixes: they last while their request runs and a moment longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix.in_flight_prefixes import InFlightPrefix, InFlightPrefixes

WORKER, OTHER = 0, 1


def depths(expected: InFlightPrefixes, hashes: list[int]) -> dict[int, int]:
    return {worker: depth for worker, (depth, _) in expected.deepest(hashes).items()}


def test_a_prefix_is_in_flight_while_its_request_runs() -> None:
    expected = InFlightPrefixes()
    expected.expect(WORKER, [1, 2])
    assert depths(expected, [1, 2, 3]) == {WORKER: 2}
    assert depths(expected, [1, 9]) == {WORKER: 1}
    assert expected.expire(1e9) == 0
    assert depths(expected, [1, 2]) == {WORKER: 2}


def test_an_unconfirmed_prefix_is_forgotten() -> None:
    expected = InFlightPrefixes()
    sent = expected.expect(WORKER, [1, 2])
    expected.end(sent, until_s=15)
    assert expected.expire(14.9) == 0
    assert depths(expected, [1, 2]) == {WORKER: 2}
    assert expected.expire(15) == 1
    assert depths(expected, [1, 2]) == {}
    assert len(expected) == 0


def test_a_long_lived_prefix_does_not_delay_the_expiry_of_others() -> None:
    expected = InFlightPrefixes()
    expected.end(expected.expect(OTHER, [7]), until_s=600)
    expected.end(expected.expect(WORKER, [1]), until_s=5)
    assert expected.expire(5) == 1
    assert depths(expected, [1, 7]) == {OTHER: 2}


def test_a_later_request_replaces_an_earlier_one() -> None:
    expected = InFlightPrefixes()
    first = expected.expect(WORKER, [1])
    expected.expect(WORKER, [1, 2])
    expected.end(first, until_s=5)
    expected.expire(5)
    assert depths(expected, [1, 2]) == {WORKER: 2}


def test_each_worker_has_its_own_prefixes() -> None:
    expected = InFlightPrefixes()
    expected.expect(WORKER, [1, 2])
    mine = expected.expect(OTHER, [1])
    assert depths(expected, [1, 2]) == {WORKER: 2, OTHER: 1}
    expected.drop(mine)
    assert depths(expected, [1, 2]) == {WORKER: 2}
    expected.forget_worker(WORKER)
    assert len(expected) == 0


def test_an_evicted_segment_is_no_longer_in_flight() -> None:
    expected = InFlightPrefixes()
    sent = expected.expect(WORKER, [1, 2])
    expected.forget_segment(WORKER, 2)
    assert depths(expected, [1, 2]) == {WORKER: 2}, "its request still runs and will bring it back"
    expected.end(sent, until_s=5)
    expected.forget_segment(WORKER, 2)
    assert len(expected) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["expect", "end", "drop", "forget", "flush", "segment", "expire"]),
            st.integers(0, 2),
            st.integers(0, 5),
            st.integers(1, 4),
        ),
        max_size=40,
    )
)
def test_no_order_of_calls_breaks_the_table(steps: list[tuple[str, int, int, int]]) -> None:
    expected = InFlightPrefixes()
    made: list[InFlightPrefix] = []
    for now_s, (step, worker, first, length) in enumerate(steps):
        if step == "expect":
            made.append(expected.expect(worker, range(first, first + length)))
        elif step == "end" and made:
            expected.end(made[first % len(made)], now_s + 3)
        elif step == "drop" and made:
            expected.drop(made[first % len(made)])
        elif step == "forget":
            expected.forget_worker(worker)
        elif step == "flush":
            expected.forget_computed(worker)
        elif step == "segment":
            expected.forget_segment(worker, first)
        elif step == "expire":
            expected.expire(now_s)
        expected.check()


def test_the_table_is_bounded_and_ended_prefixes_leave_first() -> None:
    prefixes = InFlightPrefixes(limit_segments=10)
    running = prefixes.expect(0, range(4))
    early, late = prefixes.expect(0, range(10, 13)), prefixes.expect(1, range(20, 23))
    prefixes.end(late, 9.0)
    prefixes.end(early, 5.0)
    prefixes.expect(0, range(30, 33))
    prefixes.check()
    assert (len(running.segments), len(early.segments), len(late.segments)) == (4, 0, 3)
    # A request that does not fit covers nothing, and changes no running one.
    assert prefixes.expect(0, range(100, 200)).segments == ()
    prefixes.check()
    assert len(running.segments) == 4
