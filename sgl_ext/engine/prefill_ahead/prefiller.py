"""In the HTTP process: prefills prompts before their requests come.

A job is a prompt's tokens. While the engine serves no real request, the first job's next slice is
sent as a request for no output tokens, one at a time; the scheduler runs or rejects it
(`sgl_ext.engine.scheduler.slice_gate`). The first slice is the whole prompt: if it is rejected as
too long, the rejection says how much is cached, and the next slice begins there. It loads what the
host has of the prompt, however much that is. The scheduler holds the prompt, so later slices are
sent as their last token and their length. Dropping a job undoes nothing: what was computed is in
the cache.
"""

import asyncio
import contextvars
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from scheduler.prefill import Rejection, slice_end
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import caches
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import digest, is_slice_name, slice_name
from sgl_ext.engine.core.request_context import RequestContext, enter
from sgl_ext.engine.core.shared_prefixes import salt_of_slices
from sgl_ext.engine.host_cache.token_cache import is_only_sent
from sgl_ext.engine.sglang_http_types import GenerateReqInput, TokenizerManager
from sgl_ext.engine.sglang_types import ResolvedArgs
from sgl_ext.reading.hints import LIMIT, Importance
from sgl_ext.wire.hints import read_rejection

MOST_JOBS = 256
RETURN = "return"
"""The purpose of a job for a session that is expected back."""
DEADLINE_S = 60.0
_POLL_S = 0.02
# A request that comes while a slice runs waits for it, so slices are sized to take this long.
_SLICE_S = 0.05
_LEAST_SLICE_TOKENS = 128
_FIRST_SLICE_TOKENS = 256
_SLICE_TIMEOUT_S = 60.0
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A prompt to prefill.

    name: of its conversation; a newer job of the name replaces it.
    ids: its tokens, `total` of them. request: SGLang's, made of the prompt's body; slices run in
        its name space, which is all that is left of these and the body when the job has ended.
    context: of the same body; the last slice sends its hints and sets its pins.
    is_guess: no client requested it, and it is evicted first.
    purpose: why it runs, for the log: "prefill", "standby", "ahead", "return" or "warmup".
    cached_tokens: how many were on the device before; None until that is known.
    reached_tokens: how many are there now.
    loaded_tokens: how many were loaded from the host. prefilled_tokens: how many were computed.
    reason: why it ended before all tokens were in the cache; "" if they are, or it goes on.
    end: where its next slice ends.
    is_held: whether the scheduler holds its tokens. salt: that of its slices.
    """

    name: str
    ids: "array[int]"
    request: GenerateReqInput
    context: RequestContext
    is_guess: bool = False
    purpose: str = "prefill"
    deadline_s: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)
    cached_tokens: int | None = None
    reached_tokens: int = 0
    loaded_tokens: int = 0
    prefilled_tokens: int = 0
    computed_s: float = 0.0
    reason: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    end: int = 0
    total: int = 0
    is_held: bool = False
    salt: str | None = None
    digest: str = field(default_factory=lambda: digest(uuid4().hex))

    def __post_init__(self) -> None:
        self.end = self.total = len(self.ids)

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are in the cache."""
        return self.reached_tokens >= self.total


class Prefiller:
    """Prefills jobs in the order in which they came, in slices of at most `slice_tokens`, at the
    data-parallel rank that the balancer chose.

    is_supported: False once the scheduler has rejected a slice because no slice ever runs. Then
        no prompt needs to be converted for a job.
    """

    def __init__(self, manager: TokenizerManager, args: ResolvedArgs, slice_tokens: int) -> None:
        self._has_ranks = caches(args) > 1
        self._manager = manager
        self._page = args.page_size * args.dcp_size  # as in the tree
        self._chunk_tokens = args.chunked_prefill_size or 0
        self._slice_tokens = _FIRST_SLICE_TOKENS
        self.limit_slices(slice_tokens)
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._has_jobs = asyncio.Event()
        self.is_supported = True

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, name: str) -> bool:
        return name in self._jobs

    def limit_slices(self, tokens: int) -> None:
        """Changes the longest slice, which is a chunk of SGLang's at most."""
        chunk = self._chunk_tokens
        self._max_slice_tokens = min(chunk, tokens) if chunk > 0 else tokens
        self._slice_tokens = min(self._slice_tokens, self._max_slice_tokens)

    def put(self, job: Job) -> None:
        """Adds a job, and drops the oldest if there are too many. One that no balancer sent to a
        rank ends at once: its request could go to another."""
        if self._has_ranks and job.context.rank is None:
            return self._finish(job, "no_rank")
        self.drop(job.name, "replaced")
        if len(self._jobs) >= MOST_JOBS:
            self.drop(next(iter(self._jobs)), "crowded")
        if not self.is_supported:
            return self._finish(job, "unsupported")
        self._jobs[job.name] = job
        self._has_jobs.set()
        kind = RETURN if job.purpose == RETURN else "guess" if job.is_guess else "asked"
        counter("prefills_ahead").labels(kind).inc()

    def drop(self, name: str, reason: str) -> bool:
        """Ends the job of this name; whether there was one."""
        job = self._jobs.get(name)
        if job is not None:
            self._finish(job, reason)
        return job is not None

    def drop_all(self, reason: str, are_meant: Callable[[Job], bool] = lambda _: True) -> int:
        """Ends all jobs, or those that are meant; how many there were."""
        jobs = [job for job in self._jobs.values() if are_meant(job)]
        for job in jobs:
            self._finish(job, reason)
        return len(jobs)

    async def idle(self) -> None:
        """Returns once the engine serves no real request."""
        # SGLang has no event for the end of a request.
        while any(not is_slice_name(name) for name in self._manager.rid_to_state):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await self._has_jobs.wait()
            await self.idle()
            self.drop_all("late", lambda job: job.deadline_s <= time.monotonic())
            if self._jobs:
                job = next(iter(self._jobs.values()))
                try:
                    await self._advance(job)
                except Exception as error:  # SGLang raises on requests that it rejects
                    _logger.warning("sgl-ext: a prompt was not prefilled ahead: %r", error)
                    self._finish(job, "failed")
            if not self._jobs:
                self._has_jobs.clear()

    async def _advance(self, job: Job) -> None:
        """Sends a job's next slice, and notes how far the job is."""
        before_s = job.computed_s
        meta = await self._send(job)
        outcome = _outcome(meta)
        if outcome is None:
            return self._finish(job, "failed")
        reason, cached, on_host = outcome
        if reason is Rejection.UNSUPPORTED:
            return self._stop()
        if reason is Rejection.UNHELD:
            if not job.is_held:  # it was sent whole, and SGLang changed it
                return self._finish(job, "failed")
            job.is_held, job.end = False, job.total
            return
        job.is_held = True
        if reason in (Rejection.BUSY, Rejection.MEMORY):
            counter("prefill_ahead_slices_rejected").labels(reason).inc()
        if reason is Rejection.BUSY:
            await asyncio.sleep(_POLL_S)
            return
        if job.cached_tokens is None:
            job.cached_tokens = cached
        job.reached_tokens = max(job.reached_tokens, cached)
        if reason is Rejection.MEMORY:
            return self._finish(job, "memory")
        if reason is not Rejection.TOO_LONG:
            job.reached_tokens = max(job.reached_tokens, job.end)
        if reason is None:
            new = max(job.end - cached - on_host, 0)
            job.prefilled_tokens += new
            job.loaded_tokens += on_host
            if not on_host:
                self._adapt(new, job.computed_s - before_s)
            counter("prefilled_ahead_tokens").inc(new)
            counter("loaded_ahead_tokens").inc(on_host)
        if job.is_complete:
            return self._finish(job, "")
        begin = max(job.reached_tokens, cached + on_host)  # the next slice loads the latter
        job.end = slice_end(job.total, begin, self._slice_tokens, self._page)

    def _stop(self) -> None:
        """Ends all jobs, and every later one."""
        self.is_supported = False
        self.drop_all("unsupported")
        _logger.warning(
            "sgl-ext: nothing is prefilled ahead: this engine's cache cannot use a part of a prompt"
        )

    def _adapt(self, tokens: int, took_s: float) -> None:
        """Moves the slice length half way to what takes _SLICE_S at the last slice's speed."""
        if tokens >= _LEAST_SLICE_TOKENS:
            fitting = int(tokens * _SLICE_S / max(took_s, 1e-4))
            wanted = max((self._slice_tokens + fitting) // 2, _LEAST_SLICE_TOKENS)
            self._slice_tokens = min(wanted, self._max_slice_tokens)

    async def _send(self, job: Job) -> dict[str, Any]:
        """Sends the slice; SGLang's `meta_info` of its answer."""
        is_last = job.end == job.total
        name = slice_name(
            is_guess=job.is_guess,
            is_forced=is_last and bool(job.context.pins),
            # An operator's warmup prompts are for all conversations.
            conversation="" if job.purpose == "warmup" else digest(job.name),
            prompt=job.digest,
            end=job.end,
            purpose=job.purpose,
            request_id=job.context.request_id,
        )
        if not job.is_held:
            job.salt = salt_of_slices(job.request, job.ids)
        ids = job.ids[job.end - 1 : job.end] if job.is_held else job.ids
        request = sglang_api.GenerateReqInput(
            rid=name,
            input_ids=ids if is_only_sent(self._manager) else ids.tolist(),
            sampling_params={"max_new_tokens": 0},
            extra_key=job.request.extra_key,
            cache_salt=job.salt,
            lora_path=job.request.lora_path,
            log_metrics=False,
            routed_dp_rank=job.context.rank,
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

    def _finish(self, job: Job, reason: str) -> None:
        if job.done.is_set():  # it was dropped while a slice ran
            return
        if self._jobs.get(job.name) is job:
            del self._jobs[job.name]
        job.reason, job.ids = reason, array("q")
        whole = job.request  # a client's grammar can be as long as its body
        job.request = sglang_api.GenerateReqInput(
            extra_key=whole.extra_key, cache_salt=whole.cache_salt, lora_path=whole.lora_path
        )
        job.context = replace(job.context, body=None, cached_messages=(), found_in_messages={})
        if reason:
            counter("prefills_ahead_dropped").labels(reason).inc()
        job.done.set()


def _outcome(meta: Mapping[str, Any]) -> tuple[Rejection | None, int, int] | None:
    """Why a slice was rejected, None if it ran; how many of its tokens were on the device; and how
    many the host loads, or has loaded. None if SGLang says nothing of it."""
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        return read_rejection(finish.get("message") or "")
    if (cached := meta.get("cached_tokens")) is None:
        return None
    loaded = (meta.get("cached_tokens_details") or {}).get("host", 0)
    return None, cached - loaded, loaded
