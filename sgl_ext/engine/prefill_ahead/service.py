"""Prefill ahead in the HTTP process: its parts, and the tasks that run beside the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from sgl_ext.engine.prefill_ahead.next_turns import NextTurns
from sgl_ext.engine.prefill_ahead.prefiller import DEADLINE_S, Job, Prefiller
from sgl_ext.engine.prefill_ahead.routes import PrefillRequests
from sgl_ext.engine.prefill_ahead.shared_prompts import share_prompts
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.settings.schema import EngineSettings


@asynccontextmanager
async def prefilling_ahead(
    app: Any, manager: TokenizerManager, settings: EngineSettings
) -> AsyncIterator[NextTurns | None]:
    """Lists the shared prompts. Then prefills while the block runs: first the shared prompts, then
    warmup requests, and next turns and `/v1/prefill` as they come.

    Yields None if it is off, or if the engine has several caches or no tokenizer.
    """
    shared = await share_prompts(app, manager, settings.shared_prefixes)
    flags = manager.server_args
    has_one_cache = flags.dp_size <= 1 and flags.disaggregation_mode == "null"
    if settings.prefill_ahead == "off" or not has_one_cache or manager.tokenizer is None:
        yield None
        return
    slice_tokens = settings.prefill_ahead_slice_tokens
    if (chunk := flags.chunked_prefill_size or 0) > 0:
        slice_tokens = min(chunk, slice_tokens)
    prefiller = Prefiller(manager, slice_tokens)
    requests = PrefillRequests(app, manager, prefiller)
    app.router.routes[:0] = requests.routes()
    tasks = [
        asyncio.create_task(prefiller.run()),
        asyncio.create_task(_warm_up(prefiller, shared, requests, settings.warmup_requests)),
    ]
    try:
        yield NextTurns(app, manager, prefiller, settings.prefill_ahead)
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _warm_up(
    prefiller: Prefiller, shared: Sequence[Job], requests: PrefillRequests, path: str | None
) -> None:
    for job in shared:  # one at a time: a job that waits for long is dropped
        job.deadline_s = time.monotonic() + DEADLINE_S
        prefiller.put(job)
        await job.done.wait()
    if path:
        await requests.warm_up(_bodies(path))


def _bodies(path: str) -> list[Any]:
    return [orjson.loads(line) for line in Path(path).read_bytes().splitlines()]
