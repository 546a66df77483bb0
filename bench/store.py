"""What do a stored turn and a long conversation cost in each kind of store?

    python -m bench.store --store /tmp/store.sqlite --store env:REDIS --store env:POSTGRES

Stores turns of 200 KB and reads each of them, then a conversation of 190 turns of 1 KB, which it
reads as a whole. `--store` is as the balancer's; without it a file in a temporary folder is
measured. Figures are medians and 99th percentiles in ms. What it stores expires after a minute.
With `--shape` or `--trace` the turns are those of a trace: each is stored, with the bytes of its
message and answer, and then its whole conversation is read.
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
from bench.sim.prompts import BYTES_PER_TOKEN
from bench.trace.agents import Agent, TraceConfig
from bench.trace.options import add_trace_options, trace_of
from bench.trace.variants import make_trace
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import Document, Documents
from sgl_ext.balancer.store.opening import check_store, open_store

_LIMIT_BYTES = 1 << 30
_OWNER, _TTL_S = "responses bench.store", 60.0
_TURNS = 190
_COUNT = {"full": 1000, "quick": 200, "smallest": 5}
_SESSIONS = {"full": 50, "quick": 10, "smallest": 1}

Times = dict[str, list[float]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--store", action="append", default=[])
    add_trace_options(parser)
    given = parser.parse_args()
    trace = trace_of(parser, given, TraceConfig(sessions=_SESSIONS[given.size]))
    run("store", partial(compare, given.size, given.store, make_trace(trace) if trace else ()))


def compare(
    size: Size, stores: Sequence[str], agents: Sequence[Agent] = ()
) -> dict[str, dict[str, object]]:
    """The figures of each store; `agents` of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, object] = {}
        file = f"{folder}/store.sqlite"
        for store in stores or [file]:
            check_store(store, _LIMIT_BYTES)
            times = asyncio.run(_measure_opened(store, _COUNT[size], agents))
            kind = "SQLite" if store == file else store
            figures[kind] = {name: _summary(times_ms) for name, times_ms in times.items()}
            print(kind, figures[kind], file=sys.stderr)
    return {"stores": figures}


def _summary(times_ms: list[float]) -> dict[str, float]:
    p99_ms = statistics.quantiles(times_ms, n=100)[-1]
    return {"median_ms": round(statistics.median(times_ms), 2), "p99_ms": round(p99_ms, 1)}


async def _measure_opened(store: str, count: int, agents: Sequence[Agent]) -> Times:
    documents, shared = open_store(store, _LIMIT_BYTES, Metrics(), None)
    assert documents is not None, "the limit is above 0"
    try:
        return await (measure_trace(documents, agents) if agents else measure(documents, count))
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


async def measure_trace(documents: Documents, agents: Sequence[Agent]) -> Times:
    """Milliseconds to store a turn of a trace, and to read its whole conversation."""
    times: Times = {"store_turn": [], "load_conversation": []}
    now = time.time()
    for agent in agents:
        previous = None
        for number, turn in enumerate(agent.turns):
            items = os.urandom((turn.tokens + turn.answer_tokens) * BYTES_PER_TOKEN)
            document = Document(f"agent {agent.number}, {number}", items, b"{}", previous)
            await _timed(documents.put(_OWNER, document, _TTL_S, now), times["store_turn"])
            whole = documents.chain(_OWNER, document.id, now, _LIMIT_BYTES)
            found = await _timed(whole, times["load_conversation"])
            require(isinstance(found, list) and len(found) == number + 1, "all turns are found")
            previous = document.id
    return times


async def _timed(work: Awaitable[object], times_ms: list[float]) -> object:
    begun_s = time.perf_counter()
    result = await work
    times_ms.append((time.perf_counter() - begun_s) * 1e3)
    return result


if __name__ == "__main__":
    main()
