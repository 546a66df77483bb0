"""One index in a process of its own, ours or Dynamo's: filled, weighed, then timed on request.

    python -m bench.lib.index_side ours|dynamo SEGMENTS WORKERS

Prints a JSON object once it is filled, and one for each line `SEED COUNT` on its
input: the median time of that many lookups, and a digest of what they found. Both sides
make the same prompts from the same seeds, so their digests must be equal. It imports
nothing but the standard library before it knows its side, for Dynamo lives in another
environment.

A session's prompt is a chain of OWN_SEGMENTS after the head of one of a few harnesses,
and lives on one worker; one in ten also left a part of itself on another. What is
looked up is a next turn: a session's beginning of any length, and two new segments;
one in ten is the first turn of a new session. Hashing is not timed, on either side.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
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
BLOCKS = 16  # of 64 tokens in a segment of 1,024
BLOCK_TOKENS = 64
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

    def hold(self, worker: int, chain: Sequence[int]) -> None: ...
    def queries(self, chains: list[list[int]]) -> list[list[int]]: ...
    def look_up(self, query: list[int]) -> Any: ...
    def depths(self, query: list[int]) -> dict[int, int]: ...


class Ours:
    """`radix.index.PrefixIndex`."""

    def __init__(self) -> None:
        from radix.index import PrefixIndex

        self.index = PrefixIndex(2_000_000)
        self.look_up = self.index.matches

    def hold(self, worker: int, chain: Sequence[int]) -> None:
        parent = None
        for place, segment in enumerate(chain, 1):
            self.index.store(worker, parent, segment, place * BLOCKS * BLOCK_TOKENS)
            parent = segment

    def queries(self, chains: list[list[int]]) -> list[list[int]]:
        return chains

    def depths(self, query: list[int]) -> dict[int, int]:
        return {
            worker: match.depth
            for match in self.index.matches(query)
            for worker in range(match.workers.bit_length())
            if match.workers >> worker & 1
        }

    def touch(self, query: list[int]) -> None:
        self.index.touch(query, len(query))


class Dynamo:
    """`RadixTree` of ai-dynamo-runtime: a tree of blocks, in Rust, on a thread of its own."""

    def __init__(self) -> None:
        self.tree: Any = importlib.import_module("dynamo._core").RadixTree()
        self.look_up = self.tree.find_matches
        self.events = 0

    def hold(self, worker: int, chain: Sequence[int]) -> None:
        self.events += 1
        blocks = [{"block_hash": b, "tokens_hash": b} for b in _blocks(chain)]
        stored = {"parent_hash": None, "blocks": blocks}
        event = {"event_id": self.events, "data": {"stored": stored}}
        self.tree.apply_event(worker, json.dumps(event).encode())

    def queries(self, chains: list[list[int]]) -> list[list[int]]:
        return [_blocks(chain) for chain in chains]

    def depths(self, query: list[int]) -> dict[int, int]:
        scores = self.tree.find_matches(query).scores
        return {worker: blocks // BLOCKS for (worker, _), blocks in scores.items()}


def _blocks(chain: Sequence[int]) -> list[int]:
    """64-bit hashes of a chain's blocks; each stands for everything up to its end, as ours do."""
    return [
        (segment * (2 * place + 1) >> 32) & _WORD for segment in chain for place in range(BLOCKS)
    ]


def resident_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    name, segments, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    side: Side = Ours() if name == "ours" else Dynamo()
    for worker, chain in residents(1_000, workers):  # makes what is made but once
        side.hold(worker, chain)
    before, start = resident_bytes(), time.perf_counter()
    for worker, chain in residents(segments, workers):
        side.hold(worker, chain)
    seconds = time.perf_counter() - start
    held = sessions_for(segments) * OWN_SEGMENTS + HARNESSES * HEAD_SEGMENTS
    grown = held - (sessions_for(1_000) * OWN_SEGMENTS + HARNESSES * HEAD_SEGMENTS)
    _say(
        segments=held,
        bytes_per_segment=round((resident_bytes() - before) / grown, 1),
        build_s=round(seconds, 2),
    )
    for line in sys.stdin:
        seed, count = map(int, line.split())
        queries = side.queries(prompts(segments, seed, count))
        found = repr([sorted(side.depths(query).items()) for query in queries[:20]])
        figures = {
            "lookup_us": _median_us(side.look_up, queries),
            "empty_us": _median_us(side.look_up, [[] for _ in queries]),
        }
        if isinstance(side, Ours):
            figures["touch_us"] = _median_us(side.touch, queries)
        _say(digest=hashlib.sha256(found.encode()).hexdigest(), **figures)


def _median_us(call: Any, queries: list[list[int]]) -> float:
    """Each call is timed by itself, so that one that was interrupted does not count for many."""
    times = []
    for query in queries:
        start = time.perf_counter_ns()
        call(query)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def _say(**figures: float | str) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
