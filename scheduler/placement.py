"""Which worker takes a request: rendezvous hashing of its prefix, with bounded loads.

Every worker has a fixed score for a prefix, so requests that share one agree on
a worker, several balancers agree without talking, and a worker that leaves
moves only its own prefixes (Thaler and Ravishankar, 1998). A worker already
carrying more than its fair share times a slack is passed over for the next in
the prefix's own order (consistent hashing with bounded loads: Mirrokni,
Thorup, Zadimoghaddam, 2016), so one hot prefix spreads, and spreads stably.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

LOAD_SLACK = 1.25


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker that may be chosen, and how many requests it carries."""

    name: str
    in_flight: int


def place(prefix: int | None, workers: Sequence[WorkerLoad]) -> str | None:
    """The name of the worker for a request whose prefix hashes to `prefix`.

    Without a prefix, the least loaded one, ties by name. None if there are no
    workers. No worker is chosen that carries more than LOAD_SLACK times the
    mean, counting this request, rounded up.
    """
    if not workers:
        return None
    if prefix is None:
        return min(workers, key=lambda worker: (worker.in_flight, worker.name)).name
    total = sum(worker.in_flight for worker in workers) + 1
    bound = math.ceil(LOAD_SLACK * total / len(workers))
    open_to_it = [worker for worker in workers if worker.in_flight < bound]
    assert open_to_it, "the mean is below the bound, so some worker is"
    return max(open_to_it, key=lambda worker: (_score(prefix, worker.name), worker.name)).name


def _score(prefix: int, worker: str) -> int:
    return xxhash.xxh3_64_intdigest(worker.encode(), seed=prefix & 0xFFFFFFFFFFFFFFFF)
