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
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.settings.schema import EngineSettings


class PrefillAhead:
    """The prefiller of an engine, and where its jobs come from: next turns and `/v1/prefill`."""

    def __init__(self, app: Any, manager: TokenizerManager, settings: EngineSettings) -> None:
        slice_tokens = settings.prefill_ahead_slice_tokens
        if (chunk := manager.server_args.chunked_prefill_size or 0) > 0:
            slice_tokens = min(chunk, slice_tokens)
        self.prefiller = Prefiller(manager, slice_tokens)
        self.next_turns = NextTurns(app, manager, self.prefiller, settings.prefill_ahead)
        self._requests = PrefillRequests(app, manager, self.prefiller)
        self._warmup_requests = settings.warmup_requests
        app.router.routes[:0] = self._requests.routes()

    @staticmethod
    def is_possible(settings: EngineSettings, manager: TokenizerManager) -> bool:
        """Whether it is on, and the engine has one cache and a tokenizer."""
        flags = manager.server_args
        has_one_cache = flags.dp_size <= 1 and flags.disaggregation_mode == "null"
        return settings.prefill_ahead != "off" and has_one_cache and manager.tokenizer is not None

    @asynccontextmanager
    async def running(self, first: Sequence[Job] = ()) -> AsyncIterator[None]:
        """Works while the block runs: first on the jobs of `first`, then on warmup requests."""
        tasks = [
            asyncio.create_task(self.prefiller.run()),
            asyncio.create_task(self._warm_up(first)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _warm_up(self, first: Sequence[Job]) -> None:
        for job in first:  # one at a time: a job that waits for long is dropped
            job.deadline_s = time.monotonic() + DEADLINE_S
            self.prefiller.put(job)
            await job.done.wait()
        if self._warmup_requests:
            await self._requests.warm_up(_bodies(self._warmup_requests))


def _bodies(path: str) -> list[Any]:
    return [orjson.loads(line) for line in Path(path).read_bytes().splitlines()]
