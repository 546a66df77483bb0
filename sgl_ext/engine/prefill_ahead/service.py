"""Prefill ahead in the HTTP process: its parts, and the tasks that run beside the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from starlette.responses import Response

from sgl_ext.engine.core.shared_prefixes import prefixes
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns
from sgl_ext.engine.prefill_ahead.prefiller import DEADLINE_S, Job, Prefiller
from sgl_ext.engine.prefill_ahead.routes import PrefillRequests, read_job
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.protocols.registry import detect
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
    await requests.warm_up([orjson.loads(line) for line in _lines(path)])


async def share_prompts(app: Any, manager: TokenizerManager, path: str | None) -> list[Job]:
    """Shares the prompts of the operator's file among all cache groups, and returns the jobs that
    prefill them.

    Each line is a request, converted like a real one as far as its prompt is certain. Call it
    before the server takes requests, so that the shared prompts do not change while it serves.
    Raises ValueError naming the line that cannot be shared.
    """
    jobs: list[Job] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            job = await _job(app, manager, orjson.loads(line))
        except ValueError as error:
            raise ValueError(f"shared_prefixes={path!r}: line {number}: {error}") from error
        prefixes().add(job.ids, job.request.lora_path)
        jobs.append(job)
    return jobs


async def _job(app: Any, manager: TokenizerManager, body: Any) -> Job:
    protocol = detect({}, None, body)
    if protocol is None:
        raise ValueError("is a request of no known protocol")
    job = await read_job(app, manager, protocol, (), body)
    if isinstance(job, Response):
        raise ValueError(f"was rejected: {bytes(job.body).decode()}")
    if job.request.cache_salt or job.request.extra_key:
        raise ValueError("has a cache_salt or an extra_key, which cannot be shared")
    if job.request.contains_mm_input():
        raise ValueError("is of more than text")
    return job


def _lines(path: str | None) -> list[bytes]:
    return Path(path).read_bytes().splitlines() if path else []
