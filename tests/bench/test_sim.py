"""The simulated engine's schedule, by a clock of the test's own."""

import math

import pytest

from bench.sim.engine import Engine, EngineConfig, Event, Request
from bench.sim.prompts import BLOCK_TOKENS
from sgl_ext.reading.segments import Chain

# Round numbers: a batch takes 1 s and a millisecond a token, a token of an answer 0.1 s.
CONFIG = EngineConfig(
    capacity_tokens=100 * BLOCK_TOKENS,
    max_running=4,
    prefill_tokens_per_s=1000,
    prefill_base_s=1.0,
    chunk_tokens=1_000_000,
    decode_base_s=0.1,
    decode_per_request_s=0.0,
)
SHARED = [1000 + place for place in range(10)]


def request(own: int, *, tokens: int = 641, answer: int = 1, shared: int = 10) -> Request:
    """A prompt of some shared blocks and then its own ones."""
    keys = SHARED[:shared] + [own * 10_000 + place for place in range(200)]
    return Request(keys, tokens, answer)


def run(engine: Engine) -> list[Event]:
    """To the end; the cache is checked at each step."""
    events = []
    while (at := engine.next_at()) < math.inf:
        events += engine.advance(at)
        engine.cache.check()
    return events


def shape(events: list[Event]) -> list[tuple[float, str]]:
    return [(round(event.at, 3), event.kind) for event in events]


def test_a_request_alone() -> None:
    engine = Engine(CONFIG)
    engine.submit(request(1, tokens=500, answer=11), 2.0)
    assert shape(run(engine)) == [(3.5, "first"), (4.5, "done")]
    assert engine.prefill_s == pytest.approx(1.5)


def test_the_next_turn_finds_prompt_and_answer() -> None:
    engine = Engine(CONFIG)
    first = request(1, tokens=641, answer=128)
    engine.submit(first, 0.0)
    run(engine)
    later = request(1, tokens=900)
    engine.submit(later, 100.0)
    run(engine)
    assert later.cached_tokens == (641 + 128 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = Engine(CONFIG)
    for _ in range(2):
        again = request(1, tokens=10 * BLOCK_TOKENS)
        engine.submit(again, engine.next_at() if engine.load.running else 0.0)
        run(engine)
    assert again.cached_tokens == 9 * BLOCK_TOKENS


def test_a_beginning_is_computed_twice_by_two_of_one_batch_and_once_after_it() -> None:
    engine = Engine(CONFIG)
    blocker, one, twin, late = (request(own) for own in (9, 1, 2, 3))
    blocker.keys = [77_000 + place for place in range(20)]
    engine.submit(blocker, 0.0)
    engine.submit(one, 0.1)
    engine.submit(twin, 0.2)
    run(engine)
    engine.submit(late, 50.0)
    run(engine)
    assert (one.cached_tokens, twin.cached_tokens) == (0, 0)
    assert late.cached_tokens == 10 * BLOCK_TOKENS
    assert engine.cache.protected == engine.cache.reserved == 0


def test_a_long_prompt_goes_in_chunks_and_its_follower_reads_them() -> None:
    config = EngineConfig(**{**as_dict(CONFIG), "chunk_tokens": 256})
    engine = Engine(config)
    long, follower = request(1, tokens=641), request(2, tokens=641)
    engine.submit(long, 0.0)
    engine.submit(follower, 0.1)
    events = run(engine)
    # 256, 256, then 129 of the first and 127 of the other, which had 8 blocks to read, then 2.
    assert follower.cached_tokens == 512
    assert shape(events)[0] == (3.768, "first")
    assert engine.prefill_s == pytest.approx(4 + 0.641 + 0.129)


def as_dict(config: EngineConfig) -> dict[str, float]:
    return {name: getattr(config, name) for name in EngineConfig.__slots__}


def test_decoding_pauses_for_a_prefill_and_slows_with_company() -> None:
    config = EngineConfig(**{**as_dict(CONFIG), "decode_per_request_s": 0.1})
    engine = Engine(config)
    engine.submit(request(1, tokens=500, answer=11), 0.0)
    engine.submit(request(2, tokens=500, answer=6, shared=0), 2.5)
    # First: 5 of its 10 steps alone at 0.2 s by 2.5; a pause; then 5 steps at 0.3 s.
    assert shape(run(engine)) == [(4.0, "first"), (5.5, "done"), (5.5, "done")]


def test_slots_are_bounded_and_the_queue_keeps_its_order() -> None:
    config = EngineConfig(**{**as_dict(CONFIG), "max_running": 1})
    engine = Engine(config)
    requests = [request(own, answer=2) for own in (1, 2, 3)]
    for each in requests:
        engine.submit(each, 0.0)
    assert engine.load.queued == 2
    done = [event.request for event in run(engine) if event.kind == "done"]
    assert done == requests


def test_memory_is_bounded_and_a_request_waits_for_it() -> None:
    config = EngineConfig(**{**as_dict(CONFIG), "capacity_tokens": 30 * BLOCK_TOKENS})
    engine = Engine(config)
    first, second = request(1, tokens=1200, answer=50), request(2, tokens=1200, shared=0)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    events = run(engine)
    assert [(e.kind, e.request) for e in events] == [
        ("first", first), ("done", first), ("first", second), ("done", second)
    ]  # fmt: skip
    assert engine.submit(request(3, tokens=3000), 100.0)[0].kind == "refused"


def test_load_counts_what_is_pending() -> None:
    engine = Engine(CONFIG)
    engine.submit(request(1), 0.0)
    run(engine)
    engine.submit(request(1, tokens=700, shared=10), 10.0)
    engine.submit(request(2, tokens=700, shared=10), 10.0)
    load = engine.load
    assert (load.running, load.queued) == (1, 1)
    assert load.pending_tokens == 2 * (700 - 640)
    run(engine)
    assert engine.load[:4] == (0, 0, 0, 0)


def test_segments_follow_the_blocks() -> None:
    config = EngineConfig(**{**as_dict(CONFIG), "capacity_tokens": 20 * BLOCK_TOKENS})
    engine = Engine(config)
    chain = Chain(hashes=(1, 2, 3, 4), ends=(100, 1000, 1100, 2570))
    engine.submit(Request([*SHARED, 1], 641, 1, chain), 0.0)
    run(engine)
    gone, new = engine.segments.take()
    assert gone == []
    # 256 bytes a block: a segment is held with the last full block before its end.
    assert new == [(1, None, 64), (2, 1, 192), (3, 2, 256), (4, 3, 640)]
    assert list(engine.segments.snapshot()) == new
    engine.submit(request(5, tokens=900, shared=0), 10.0)
    run(engine)
    assert 4 in engine.segments.take()[0]
    engine.flush()
    engine.segments.take()
    assert not engine.segments.held
    assert len(engine.cache) == 0
