"""The sides of bench/index hold what they were told."""

from __future__ import annotations

import pytest

from bench.lib.fleet import routing_of
from bench.lib.index_side import HEAD_SEGMENTS, OWN_SEGMENTS, Ours, residents


@pytest.mark.parametrize("workers", [1, 8])
def test_a_fleets_router_places_turns_where_their_conversation_is(workers: int) -> None:
    side = Ours(workers, 2_000)
    held: dict[int, tuple[int, list[int]]] = {}
    for worker, chain in residents(2_000, workers):
        side.apply(worker, side.event(chain))
        if len(chain) == HEAD_SEGMENTS + OWN_SEGMENTS:
            held.setdefault(chain[-1], (worker, chain))
    for worker, chain in held.values():
        attempt = side.router.place(routing_of([*chain, 7], HEAD_SEGMENTS, 1024), set())
        assert attempt is not None
        assert attempt.worker.slot == worker
        side.router.attempts.fail(attempt, by_worker=False)
