"""Prefill ahead in the HTTP process: what listens, what works, and when it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from sgl_ext.engine.core import hints
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns
from sgl_ext.engine.prefill_ahead.prefiller import DEADLINE_S, Job, Prefiller
from sgl_ext.engine.prefill_ahead.routes import Warmups, prefill_routes
from sgl_ext.settings.schema import EngineSettings


@asynccontextmanager
async def prefilling(
    app: Any, manager: Any, first: Sequence[Job] = ()
) -> AsyncIterator[Prefiller | None]:
    """Serves `/v1/prefill` and guesses next turns for as long as the server runs.

    It begins with the jobs of `first`, and goes on with what is to be warmed. Not where an
    engine is in several parts that have a cache each.
    """
    settings, flags = EngineSettings.from_environment(), manager.server_args
    parts = flags.dp_size > 1 or flags.disaggregation_mode != "null"
    if settings.prefill_ahead == "off" or parts or manager.tokenizer is None:
        yield None
        return
    chunk = flags.chunked_prefill_size or 0
    slice_tokens = min(chunk, settings.prefill_ahead_slice_tokens) if chunk > 0 else 0
    prefiller = Prefiller(manager, slice_tokens or settings.prefill_ahead_slice_tokens)
    turns = NextTurns(app, manager, prefiller, settings.prefill_ahead)
    app.state.sgl_ext_next_turns = turns
    warmups = Warmups(app, manager, prefiller)
    app.router.routes[:0] = prefill_routes(warmups)
    hints.watch_requests(turns.came)
    working = [asyncio.create_task(prefiller.run())]
    working.append(asyncio.create_task(_begin(prefiller, first, warmups, settings.warmup_requests)))
    try:
        yield prefiller
    finally:
        for task in working:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _begin(
    prefiller: Prefiller, first: Sequence[Job], warmups: Warmups, warmup_requests: str | None
) -> None:
    """One after the other, as each is given up if it waits for long."""
    for job in first:
        job.deadline_s = time.monotonic() + DEADLINE_S
        prefiller.put(job)
        await job.done.wait()
    if warmup_requests:
        await warmups.warm(_bodies(warmup_requests))


def _bodies(path: str) -> list[Any]:
    return [orjson.loads(line) for line in Path(path).read_bytes().splitlines()]
