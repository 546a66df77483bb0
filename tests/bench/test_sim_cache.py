"""The simulated cache: its invariants at every step, and what it evicts first."""

from hypothesis import given
from hypothesis import strategies as st

from bench.sim.cache import BlockCache

A, B, C, D, E = range(1, 6)


def held(*paths: tuple[list[int], float], capacity: int = 100) -> BlockCache:
    """A cache that holds these paths, each used at its time."""
    cache = BlockCache(capacity)
    for path, at in paths:
        known = cache.match(path, len(path))
        assert cache.reserve(len(path) - known)[0]
        cache.release(len(path) - known)
        cache.insert(path, known, len(path), at)
    cache.check()
    return cache


def test_match_counts_the_held_beginning() -> None:
    cache = held(([A, B, C], 1.0))
    assert cache.match([A, B, C, D], 4) == 3
    assert cache.match([A, B, C], 2) == 2
    assert cache.match([D, A], 2) == 0


def test_the_leaf_used_longest_ago_goes_first() -> None:
    cache = held(([A, B], 1.0), ([A, C], 2.0), ([D], 3.0), capacity=4)
    assert cache.reserve(2) == (True, [B, C])
    cache.check()


def test_a_parent_is_as_fresh_as_its_last_child() -> None:
    cache = held(([A, B], 5.0), ([C], 3.0), capacity=3)
    assert cache.reserve(1) == (True, [C])
    assert cache.reserve(1) == (True, [B])


def test_a_lock_protects_the_whole_beginning() -> None:
    cache = held(([A, B, C], 1.0), ([D], 2.0), capacity=4)
    cache.lock(B)
    assert cache.protected == 2
    assert cache.reserve(3) == (False, [])
    assert cache.reserve(2) == (True, [C, D])
    cache.check()


def test_locks_add_up_and_come_off() -> None:
    cache = held(([A, B], 1.0), capacity=2)
    for _ in range(2):
        cache.lock(B)
    cache.unlock(B, 2.0)
    assert not cache.reserve(1)[0]
    cache.unlock(B, 2.0)
    assert cache.reserve(2) == (True, [B, A])


def test_clear_spares_what_is_locked() -> None:
    cache = held(([A, B, C], 1.0))
    cache.lock(A)
    assert cache.clear() == [C, B]
    assert cache.match([A, B], 2) == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["run", "end", "clear"]),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
    ),
    max_size=60,
)


@given(steps)
def test_invariants_hold_whatever_happens(steps: list[tuple[str, list[int]]]) -> None:
    cache = BlockCache(10)
    running: list[int] = []
    for now, (action, path) in enumerate(steps):
        if action == "run":
            # A block's key tells its whole beginning, as a chained hash does.
            keys = [int("1" + "".join(map(str, path[: end + 1]))) for end in range(len(path))]
            known = cache.match(keys, len(keys))
            if known:
                cache.lock(keys[known - 1])
            enough, evicted = cache.reserve(len(keys) - known)
            assert enough or not evicted
            if enough:
                cache.release(len(keys) - known)
                cache.insert(keys, known, len(keys), now)
                cache.lock(keys[-1])
                running.append(keys[-1])
            if known:
                cache.unlock(keys[known - 1], now)
        elif action == "end" and running:
            cache.unlock(running.pop(path[0] % len(running)), now)
        else:
            cache.clear()
        cache.check()
    for key in running:
        cache.unlock(key, len(steps))
    cache.clear()
    assert len(cache) == 0
