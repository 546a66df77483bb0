"""In the HTTP process: prompts that are to be in the cache before they are asked for.

A job is a prompt's tokens. While nothing real is under way, the first job's next slice is sent
like any request that wants no answer, one at a time; the scheduler runs it or says why not
(`sgl_ext.engine.scheduler.slice_gate`). The first slice is the whole prompt: what is refused as too
much tells how much is cached, and there it goes on. Nothing is undone when a job is dropped, as
what was computed is in the cache."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.prefill import Rejection, slice_end
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, enter
from sgl_ext.engine.core.slices import is_slice_name, read_refusal, slice_name
from sgl_ext.requests.priority import LIMIT, Importance

MOST_JOBS = 256
DEADLINE_S = 60.0
_LOOK_S = 0.02
# What comes while a slice runs waits for it: so it is as long as this takes, by those before.
_SLICE_S = 0.05
_LEAST_SLICE_TOKENS = 128
_FIRST_SLICE_TOKENS = 256
_SLICE_TIMEOUT_S = 60.0
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A prompt that is to be in the cache.

    name: whose it is; a newer job of the name takes its place.
    ids: its tokens, `total` of them; given up when it has ended.
    asked: SGLang's request that came of it, for what belongs to its name space.
    context: what was read of it, told with the last slice; its pins are taken then.
    is_guess: nobody asked for it, and it is the first to be evicted.
    cached_tokens: how much was there before; None until that is known.
    reached_tokens: up to where it is in the cache.
    why: of an end before all of it is in the cache; "" while it goes on.
    """

    name: str
    ids: list[int]
    asked: Any
    context: RequestContext
    is_guess: bool = False
    deadline_s: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)
    cached_tokens: int | None = None
    reached_tokens: int = 0
    prefilled_tokens: int = 0
    computed_s: float = 0.0
    why: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    end: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.end = self.total = len(self.ids)

    @property
    def is_complete(self) -> bool:
        """Whether all of it is in the cache."""
        return self.reached_tokens >= self.total


class Prefiller:
    """Prefills jobs, in the order in which they came, `slice_tokens` at once at most.

    One an engine.
    """

    def __init__(self, manager: Any, slice_tokens: int) -> None:
        self._manager = manager
        self._most_tokens = slice_tokens
        self._slice_tokens = min(_FIRST_SLICE_TOKENS, slice_tokens)
        self._page = manager.server_args.page_size or 1
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._some = asyncio.Event()

    def put(self, job: Job) -> None:
        """One more job; the oldest is dropped if there are too many."""
        self.drop(job.name, "replaced")
        if len(self._jobs) >= MOST_JOBS:
            self.drop(next(iter(self._jobs)), "crowded")
        self._jobs[job.name] = job
        self._some.set()
        counter("prefills_ahead").labels("guess" if job.is_guess else "asked").inc()

    def drop(self, name: str, why: str) -> bool:
        """Ends a job; whether there was one."""
        job = self._jobs.get(name)
        if job is not None:
            self._finish(job, why)
        return job is not None

    def drop_all(self, why: str) -> None:
        """Ends all jobs."""
        for name in list(self._jobs):
            self.drop(name, why)

    async def idle(self) -> None:
        """Returns once nothing real is under way."""
        while self._is_busy():  # noqa: ASYNC110 - nobody tells when a request ends
            await asyncio.sleep(_LOOK_S)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await self._some.wait()
            await self.idle()
            self._drop_late()
            if self._jobs:
                job = next(iter(self._jobs.values()))
                try:
                    await self._advance(job)
                except Exception as error:  # of SGLang's, which refuses what it cannot do
                    _logger.warning("sgl-ext: a prompt was not prefilled ahead: %r", error)
                    self._finish(job, "failed")
            if not self._jobs:
                self._some.clear()

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline_s <= now_s]:
            self._finish(job, "late")

    def _is_busy(self) -> bool:
        return any(not is_slice_name(name) for name in self._manager.rid_to_state)

    async def _advance(self, job: Job) -> None:
        """Sends a job's next slice."""
        before_s = job.computed_s
        meta = await self._send(job)
        reason = meta.get("finish_reason") or {}
        refused = (
            read_refusal(reason.get("message") or "") if reason.get("type") == "abort" else None
        )
        if refused is None and reason.get("type") == "abort":
            return self._finish(job, "failed")
        if refused is None:
            new = max(job.end - meta["cached_tokens"], 0)
            self._found(job, meta["cached_tokens"])
            job.reached_tokens = max(job.reached_tokens, job.end)
            job.prefilled_tokens += new
            self._adapt(new, job.computed_s - before_s)
            counter("prefilled_ahead_tokens").inc(new)
        else:
            why, cached = refused
            if why is Rejection.BUSY:
                counter("prefill_ahead_slices_refused").labels(why).inc()
                await asyncio.sleep(_LOOK_S)
                return
            self._found(job, cached)
            if why is Rejection.MEMORY:
                counter("prefill_ahead_slices_refused").labels(why).inc()
                return self._finish(job, "memory")
            job.reached_tokens = max(
                job.reached_tokens, job.end if why is Rejection.TOO_SHORT else 0
            )
        if job.is_complete:
            return self._finish(job, "")
        cached = job.reached_tokens if refused is None else cached
        job.end = slice_end(job.total, cached, self._slice_tokens, self._page)

    def _adapt(self, tokens: int, took_s: float) -> None:
        """Moves the length of slices half way to what, by the last one, takes a moment."""
        if tokens >= _LEAST_SLICE_TOKENS:
            fitting = int(tokens * _SLICE_S / max(took_s, 1e-4))
            wanted = max((self._slice_tokens + fitting) // 2, _LEAST_SLICE_TOKENS)
            self._slice_tokens = min(wanted, self._most_tokens)

    async def _send(self, job: Job) -> dict[str, Any]:
        """A slice's meta information as SGLang answers it."""
        is_last = job.end == job.total
        name = slice_name(is_guess=job.is_guess, is_forced=is_last and bool(job.context.pins))
        request = sglang_api.GenerateReqInput(
            rid=name,
            input_ids=job.ids[: job.end],
            sampling_params={"max_new_tokens": 0},
            extra_key=job.asked.extra_key,
            cache_salt=job.asked.cache_salt,
            lora_path=job.asked.lora_path,
            log_metrics=False,
        )
        slice_context = contextvars.Context()
        if is_last:
            context = replace(job.context, importance=Importance(-LIMIT), are_hints_sent=False)
            slice_context.run(enter, context)
        started = time.monotonic()
        task = asyncio.create_task(self._answer(request), context=slice_context)
        try:
            return await asyncio.wait_for(task, _SLICE_TIMEOUT_S)
        finally:
            job.computed_s += time.monotonic() - started

    async def _answer(self, request: Any) -> dict[str, Any]:
        answers = [answer async for answer in self._manager.generate_request(request, None)]
        meta: dict[str, Any] = answers[-1]["meta_info"]
        return meta

    def _found(self, job: Job, cached: int) -> None:
        if job.cached_tokens is None:
            job.cached_tokens = cached
        job.reached_tokens = max(job.reached_tokens, cached)

    def _finish(self, job: Job, why: str) -> None:
        if job.done.is_set():  # dropped while a slice of it ran
            return
        if self._jobs.get(job.name) is job:
            del self._jobs[job.name]
        job.why, job.ids = why, []
        if why:
            counter("prefills_ahead_dropped").labels(why).inc()
        job.done.set()
