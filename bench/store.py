"""What do a stored turn and a long conversation cost in each kind of store?

    python -m bench.store --store /tmp/store.sqlite --store env:REDIS --store env:POSTGRES

Stores turns of 200 KB and reads each of them, then a conversation of 190 turns of 1 KB, which it
reads as a whole. `--store` is as the balancer's; without it a file in a temporary folder is
measured. Figures are medians and 99th percentiles in ms. What it stores expires after a minute.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from functools import partial

from bench.lib.script import Size, parser_of, require, run
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import Document, Documents
from sgl_ext.balancer.store.opening import check_store, open_store

_LIMIT_BYTES = 1 << 30
_OWNER, _TTL_S = "responses bench.store", 60.0
_TURNS = 190
_COUNT = {"full": 1000, "quick": 200, "smallest": 5}

Times = dict[str, list[float]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--store", action="append", default=[])
    given = parser.parse_args()
    run("store", partial(compare, given.size, given.store))


def compare(size: Size, stores: Sequence[str]) -> dict[str, object]:
    """The figures of each store."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {}
        for store in stores or [f"{folder}/store.sqlite"]:
            check_store(store, _LIMIT_BYTES)
            times = asyncio.run(_measure_opened(store, _COUNT[size]))
            figures[store] = {name: _summary(times_ms) for name, times_ms in times.items()}
            print(store, figures[store], file=sys.stderr)
    return {"stores": figures}


def _summary(times_ms: list[float]) -> dict[str, float]:
    p99_ms = statistics.quantiles(times_ms, n=100)[-1]
    return {"median_ms": round(statistics.median(times_ms), 2), "p99_ms": round(p99_ms, 1)}


async def _measure_opened(store: str, count: int) -> Times:
    documents, shared = open_store(store, _LIMIT_BYTES, Metrics(), None)
    assert documents is not None, "the limit is above 0"
    try:
        return await measure(documents, count)
    finally:
        await documents.close()
        if shared is not None:
            await shared.close()


async def measure(documents: Documents, count: int) -> Times:
    """Milliseconds of each call, by what it did."""
    times: Times = {"store_200_kb": [], "load_200_kb": [], "store_1_kb": [], "load_190_turns": []}
    now = time.time()
    for number in range(count):
        turn = Document(f"large {number}", os.urandom(200_000), b"{}")
        await _timed(documents.put(_OWNER, turn, _TTL_S, now), times["store_200_kb"])
        chain = documents.chain(_OWNER, turn.id, now, _LIMIT_BYTES)
        require(await _timed(chain, times["load_200_kb"]) == [turn.items], "a turn is found")
    for number in range(_TURNS):
        previous = f"turn {number - 1}" if number else None
        turn = Document(f"turn {number}", os.urandom(1000), b"{}", previous)
        await _timed(documents.put(_OWNER, turn, _TTL_S, now), times["store_1_kb"])
    for _ in range(20):
        whole = documents.chain(_OWNER, f"turn {_TURNS - 1}", now, _LIMIT_BYTES)
        found = await _timed(whole, times["load_190_turns"])
        require(isinstance(found, list) and len(found) == _TURNS, "all turns are found")
    return times


async def _timed(work: Awaitable[object], times_ms: list[float]) -> object:
    begun_s = time.perf_counter()
    result = await work
    times_ms.append((time.perf_counter() - begun_s) * 1e3)
    return result


if __name__ == "__main__":
    main()
