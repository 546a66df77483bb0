"""One index in a process of its own, ours or Dynamo's: filled, weighed, then timed on request.

    python -m bench.lib.index_side ours|dynamo SEGMENTS WORKERS

Prints a JSON object once it is filled, and one for each line `SEED COUNT` on its
input: the times of that many lookups, and a digest of what they found. Both sides
make the same prompts from the same seeds, so their digests must be equal. It imports
nothing but the standard library before it knows its side, for Dynamo lives in another
environment.

A session's prompt is a chain of OWN_SEGMENTS after the head of one of a few harnesses,
and lives on one worker; one in ten also left a part of itself on another. What is
looked up is a next turn: a session's beginning of any length, and two new segments;
one in ten is the first turn of a new session. Hashing is not timed, on either side,
and neither is the making of the events with which an index is filled.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

HARNESSES = 8
HEAD_SEGMENTS = 10
OWN_SEGMENTS = 120
LOOKUPS = 500
BLOCKS = 16  # of 64 tokens in a segment of 1,024
BLOCK_TOKENS = 64
SEGMENT_TOKENS = BLOCKS * BLOCK_TOKENS
_WORD = 2**64 - 1


def head(number: int) -> list[int]:
    random = Random(f"head {number % HARNESSES}")
    return [random.getrandbits(128) for _ in range(HEAD_SEGMENTS)]


def session(number: int) -> list[int]:
    random = Random(f"session {number}")
    return head(number) + [random.getrandbits(128) for _ in range(OWN_SEGMENTS)]


def sessions_for(segments: int) -> int:
    return max(1, (segments - HARNESSES * HEAD_SEGMENTS) // OWN_SEGMENTS)


def residents(segments: int, workers: int) -> Iterator[tuple[int, list[int]]]:
    """(worker, chain) of everything that is held."""
    random = Random(f"workers {workers}")
    for number in range(sessions_for(segments)):
        chain = session(number)
        yield random.randrange(workers), chain
        if random.random() < 0.1:
            yield random.randrange(workers), chain[: random.randint(HEAD_SEGMENTS, len(chain))]


def prompts(segments: int, seed: int, count: int) -> list[list[int]]:
    random = Random(f"prompts {seed}")
    found = []
    for _ in range(count):
        number = random.randrange(sessions_for(segments))
        known = head(number)
        if random.random() >= 0.1:
            known = session(number)[
                : random.randint(HEAD_SEGMENTS + 1, HEAD_SEGMENTS + OWN_SEGMENTS)
            ]
        found.append([*known, random.getrandbits(128), random.getrandbits(128)])
    return found


class Side(Protocol):
    """What is measured."""

    def event(self, chain: Sequence[int]) -> Any: ...
    def apply(self, worker: int, event: Any) -> None: ...
    def queries(self, chains: list[list[int]]) -> list[list[int]]: ...
    def look_up(self, query: list[int]) -> Any: ...
    def depths(self, query: list[int]) -> dict[int, int]: ...
    def decisions_us(self, chains: list[list[int]]) -> list[float]: ...


class Ours:
    """`radix.index.PrefixIndex`, in the router of a balancer with so many ready workers."""

    def __init__(self, workers: int, segments: int) -> None:
        from bench.lib.fleet import router_of

        self.router = router_of(workers, limit_segments=max(2_000_000, segments + segments // 8))
        index = self.router.prefixes.written
        assert index is not None, "this process writes its index"
        self.index = index
        self.look_up = self.index.matches

    def event(self, chain: Sequence[int]) -> tuple[Any, list[int]]:
        """A chain as the reader of an engine's events has it."""
        from radix.index import halves_of

        tokens = [place * SEGMENT_TOKENS for place in range(1, len(chain) + 1)]
        return halves_of(chain), tokens

    def apply(self, worker: int, event: tuple[Any, list[int]]) -> None:
        halves, tokens = event
        self.index.store_chain(worker, None, halves, tokens)

    def queries(self, chains: list[list[int]]) -> list[list[int]]:
        return chains

    def depths(self, query: list[int]) -> dict[int, int]:
        return {
            worker: match.depth
            for match in self.index.matches(query)
            for worker in range(match.workers.bit_length())
            if match.workers >> worker & 1
        }

    def decisions_us(self, chains: list[list[int]]) -> list[float]:
        """Each request ends before the next one, so that none waits or follows another."""
        from bench.lib.fleet import routing_of

        times = []
        for chain in chains:
            routing = routing_of(chain, HEAD_SEGMENTS, SEGMENT_TOKENS)
            start = time.perf_counter_ns()
            attempt = self.router.place(routing, set())
            times.append((time.perf_counter_ns() - start) / 1000)
            assert attempt is not None, "some worker has capacity"
            self.router.attempts.fail(attempt, by_worker=False)
        return times


class Dynamo:
    """`RadixTree` of ai-dynamo-runtime: a tree of blocks, in Rust, on a thread of its own.

    Decisions are those of its `SelectionService`, whose own tree is empty, because only engines
    fill it, over sockets. So its lookups end at the first block, and decisions take their least.
    """

    def __init__(self, workers: int) -> None:
        self.core: Any = importlib.import_module("dynamo._core")
        self.tree: Any = self.core.RadixTree()
        self.workers = workers
        self.service: Any = None
        self.runner = asyncio.Runner()
        self.look_up = self.tree.find_matches
        self.events = 0

    def event(self, chain: Sequence[int]) -> bytes:
        self.events += 1
        blocks = [{"block_hash": b, "tokens_hash": b} for b in _blocks(chain)]
        stored = {"parent_hash": None, "blocks": blocks}
        return json.dumps({"event_id": self.events, "data": {"stored": stored}}).encode()

    def apply(self, worker: int, event: bytes) -> None:
        self.tree.apply_event(worker, event)

    def queries(self, chains: list[list[int]]) -> list[list[int]]:
        return [_blocks(chain) for chain in chains]

    def depths(self, query: list[int]) -> dict[int, int]:
        scores = self.tree.find_matches(query).scores
        return {worker: blocks // BLOCKS for (worker, _), blocks in scores.items()}

    def decisions_us(self, chains: list[list[int]]) -> list[float]:
        return self.runner.run(self._select(chains))

    async def _select(self, chains: list[list[int]]) -> list[float]:
        if self.service is None:
            self.service = self.core.SelectionService(indexer_threads=1)
            for worker in range(self.workers):
                await self.service.upsert_worker(
                    {
                        "worker_id": worker,
                        "model_name": "model",
                        "block_size": BLOCK_TOKENS,
                        "endpoint": f"http://127.0.0.1:{worker + 1}",
                        "kv_events_endpoint": f"ipc:///dev/shm/no-events-{worker}",
                    }
                )
        times = []
        for chain in chains:
            blocks = [block >> 1 for block in _blocks(chain)]  # it takes them signed
            request = {
                "model_name": "model",
                "block_hashes": blocks,
                "sequence_hashes": blocks,
                "isl_tokens": len(blocks) * BLOCK_TOKENS,
            }
            start = time.perf_counter_ns()
            await self.service.select(request)
            times.append((time.perf_counter_ns() - start) / 1000)
        return times


def _blocks(chain: Sequence[int]) -> list[int]:
    """64-bit hashes of a chain's blocks; each stands for everything up to its end, as ours do."""
    return [
        (segment * (2 * place + 1) >> 32) & _WORD for segment in chain for place in range(BLOCKS)
    ]


def resident_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def fill(side: Side, segments: int, workers: int) -> float:
    """Returns the seconds that the index took."""
    seconds = 0.0
    for worker, chain in residents(segments, workers):
        event, start = side.event(chain), time.perf_counter()
        side.apply(worker, event)
        seconds += time.perf_counter() - start
    return seconds


def main() -> None:
    name, segments, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("DYN_LOG", "error")
    side: Side = Ours(workers, segments) if name == "ours" else Dynamo(workers)
    fill(side, 1_000, workers)  # makes what is made but once
    before = resident_bytes()
    seconds = fill(side, segments, workers)
    held = sessions_for(segments) * OWN_SEGMENTS + HARNESSES * HEAD_SEGMENTS
    grown = held - (sessions_for(1_000) * OWN_SEGMENTS + HARNESSES * HEAD_SEGMENTS)
    _say(
        segments=held,
        bytes_per_segment=round((resident_bytes() - before) / grown, 1),
        apply_us_per_segment=round(seconds * 1e6 / _stored(segments, workers), 2),
    )
    for line in sys.stdin:
        seed, count = map(int, line.split())
        chains = prompts(segments, seed, count)
        queries = side.queries(chains)
        found = repr([sorted(side.depths(query).items()) for query in queries[:20]])
        times = _times_us(side.look_up, queries)
        figures = {
            "lookup_us": statistics.median(times),
            "lookup_p99_us": _p99(times),
            "empty_us": statistics.median(_times_us(side.look_up, [[] for _ in queries])),
        }
        times = side.decisions_us(chains)
        figures["decision_us"] = statistics.median(times)
        figures["decision_p99_us"] = _p99(times)
        _say(digest=hashlib.sha256(found.encode()).hexdigest(), **figures)


def _stored(segments: int, workers: int) -> int:
    return sum(len(chain) for _, chain in residents(segments, workers))


def _times_us(call: Any, queries: list[list[int]]) -> list[float]:
    """Each call is timed by itself, so that one that was interrupted does not count for many."""
    times = []
    for query in queries:
        start = time.perf_counter_ns()
        call(query)
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def _say(**figures: float | str) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
