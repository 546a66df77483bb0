"""Prefill ahead in the HTTP process: its parts, the tasks beside the server, and `/v1/prefill`.

`/v1/prefill` puts a prompt, complete or not, into the cache before its request comes.

POST     a request body of one of three protocols, as far as it is known. `nvext.protocol` or
         ?protocol= names the protocol (messages, chat, responses) where the body leaves it open.
         {"prompt_tokens", "cached_tokens", "loaded_tokens", "prefilled_tokens", "segments",
          "complete", "why"}
         ?wait=false: 202 at once, without these
DELETE   ?session=ID   {"deleted": how many}

The engine converts and prefills while it serves nothing else. A call that waits is answered when
all tokens are in the cache, when the job is dropped, or after WAIT_S with what was reached, while
the job goes on. `cached_tokens` were on the device before, and `loaded_tokens` on the host.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sgl_ext.engine.arguments import caches, in_effect
from sgl_ext.engine.core.counters import background_failed, counter
from sgl_ext.engine.core.request_context import Headers, conversation_name, convert
from sgl_ext.engine.core.shared_prefixes import prefixes
from sgl_ext.engine.core.workers import Workers
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns, SessionReturns, certain_ids
from sgl_ext.engine.prefill_ahead.prefiller import DEADLINE_S, Job, Prefiller
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.protocols.registry import detect
from sgl_ext.protocols.request_ids import HEADER as REQUEST_ID_HEADER
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.reading.next_turn import Turn, partial_turn
from sgl_ext.reading.protocol import Protocol
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.supervision import Guard, supervise
from sgl_ext.wire.headers import OWNER_HEADER, PURPOSE_HEADER, RANK_HEADER, TENANT_HEADER

WAIT_S = 30.0
MOST_WAITING = 64
_RETRY_AFTER_S = 5
_RETRY_S = 1.0
_RETURNS_S = 0.1
_logger = logging.getLogger(__name__)


@asynccontextmanager
async def prefilling_ahead(
    app: Any, manager: TokenizerManager, settings: EngineSettings, workers: Workers
) -> AsyncIterator[NextTurns | None]:
    """Lists the shared prompts. Then prefills while the block runs: first the shared prompts, then
    warmup requests, and next turns and `/v1/prefill` as they come.

    Yields None if it is off, or if the engine has no tokenizer, does not both prefill and decode,
    or has memory that can be released. Of several workers the lead prefills the shared prompts and
    warmup requests.
    """
    shared = await share_prompts(app, manager, settings.shared_prefixes)
    args = in_effect()
    # SGLang ends an engine whose memory is released while a request runs.
    may_run = args.disaggregation_mode == "null" and not args.enable_memory_saver
    if settings.prefill_ahead == "off" or not may_run or manager.tokenizer is None:
        yield None
        return
    prefiller = Prefiller(manager, args, settings.prefill_ahead_slice_tokens)
    returns = SessionReturns(prefiller) if args.enable_hierarchical_cache else None
    requests = PrefillRequests(app, manager, prefiller, caches(args), returns, workers)
    app.router.routes[:0] = [
        Route(PREFILL, requests.post, methods=["POST"]),
        Route(PREFILL, requests.delete, methods=["DELETE"]),
    ]
    tasks: list[asyncio.Task[None]] = [
        asyncio.create_task(supervise("prefill_ahead", background_failed, prefiller.run, _RETRY_S)),
    ]
    if workers.is_lead:
        tasks.append(asyncio.create_task(requests.warm_up(shared, settings.warmup_requests)))
    if returns is not None:
        work = supervise("returns", background_failed, returns.load_due, _RETURNS_S)
        tasks.append(asyncio.create_task(work))
    try:
        yield NextTurns(app, manager, prefiller, settings.prefill_ahead, returns)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PrefillRequests:
    """The requests to prefill: of clients, and of the operator's files, which each data-parallel
    rank prefills."""

    def __init__(
        self,
        app: Any,
        manager: TokenizerManager,
        prefiller: Prefiller,
        ranks: int = 1,
        returns: SessionReturns | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._workers = workers or Workers()
        self._ranks = range(ranks)
        self._app = app
        self._manager = manager
        self._prefiller = prefiller
        self._returns = returns
        self._converts = asyncio.Lock()
        self._owners: dict[asyncio.Task[Response], str] = {}

    async def post(self, request: Request) -> Response:
        """Answers POST."""
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return _error(f"the body is not JSON: {error}")
        waits = request.query_params.get("wait", "true")
        if waits not in ("true", "false"):
            return _error(f"wait: must be true or false, not {waits[:40]!r}")
        protocol = detect(dict(request.headers.items()), request.query_params.get("protocol"), body)
        if protocol is None:
            names = "messages, chat or responses"
            return _error(f"protocol: must be {names}, as the body leaves it open")
        if not self._prefiller.is_supported:  # before the prompt is converted
            counter("prefills_ahead_dropped").labels("unsupported").inc()
            return JSONResponse(_so_far([], "unsupported"))
        owner = request.headers.get(TENANT_HEADER, "")
        if self._is_full(owner):
            what = f"{len(self._owners)} prompts are waiting to be prefilled"
            return _error(what, HTTPStatus.TOO_MANY_REQUESTS)
        begun: list[Job] = []
        task = asyncio.create_task(self._prefill(protocol, request.headers.raw, body, begun))
        self._owners[task] = owner
        task.add_done_callback(self._owners.pop)
        if waits == "false":
            return JSONResponse({"queued": True}, HTTPStatus.ACCEPTED)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({task, gone}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        return task.result() if task.done() else JSONResponse(_so_far(begun, "busy"))

    def _is_full(self, owner: str) -> bool:
        """Whether a tenant has as many prompts waiting as there is room left for. So however many
        one sends, another finds room."""
        waiting = list(self._owners.values())
        return waiting.count(owner) >= MOST_WAITING - len(waiting)

    async def warm_up(self, shared: Sequence[Job], path: str | None) -> None:
        """Prefills the shared prompts, and then those of a file of requests, one by one."""
        guard = Guard("warm_up", background_failed)
        for job in (_at_rank(job, rank) for job in shared for rank in self._ranks):
            # A job that waits for long is dropped.
            job.deadline_s = time.monotonic() + DEADLINE_S
            with guard:
                self._prefiller.put(job)
                await job.done.wait()
        lines: list[bytes] = []
        with guard:
            lines = _lines(path)
        for number, line in enumerate(lines, start=1):
            for rank in self._ranks:
                with guard:
                    await self._warm_up(number, orjson.loads(line), rank)

    async def _warm_up(self, number: int, body: Any, rank: int) -> None:
        protocol = detect({}, None, body)
        answer = None
        if protocol is not None:
            headers = [*_warmup_headers(number), (RANK_HEADER.encode(), b"%d" % rank)]
            answer = await self._prefill(protocol, headers, body, [])
        if answer is None or answer.status_code != HTTPStatus.OK:
            why = "unknown protocol" if answer is None else bytes(answer.body).decode()
            _logger.warning("sgl-ext: warmup request %d was rejected: %s", number, why)

    async def delete(self, request: Request) -> Response:
        """Answers DELETE."""
        session = request.query_params.get("session")
        if not session:
            return _error("session: must be given")
        owner = request.headers.get(OWNER_HEADER)

        def is_meant(job: Job) -> bool:
            return job.context.session == session and owner in (None, job.context.owner)

        deleted = self._prefiller.drop_all("deleted", is_meant)
        if self._returns is not None:
            deleted += self._returns.drop_all("deleted", is_meant)
        for answer in await self._workers.tell(request.scope):
            deleted += 0 if answer is None else orjson.loads(answer)["deleted"]
        return JSONResponse({"deleted": deleted})

    async def _prefill(
        self, protocol: Protocol, headers: Headers, body: Any, begun: list[Job]
    ) -> Response:
        """Converts a body while the engine is idle, and prefills it by a job, which it adds to
        `begun`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DEADLINE_S
        async with self._converts:
            try:
                await asyncio.wait_for(self._prefiller.idle(), deadline_s - loop.time())
            except TimeoutError:
                counter("prefills_ahead_dropped").labels("busy").inc()
                return JSONResponse(_so_far(begun, "busy"))
            job = await read_job(self._app, self._manager, protocol, headers, body)
        if isinstance(job, Response):
            return job
        begun.append(job)
        self._prefiller.put(job)
        await job.done.wait()
        return JSONResponse(_so_far(begun, job.reason))


async def read_job(
    app: Any, manager: TokenizerManager, protocol: Protocol, headers: Headers, body: Any
) -> Job | Response:
    """The job that prefills the prompt of a body, as far as it is certain; or the error that
    answers its request."""
    turn = partial_turn(protocol, body, secrets.token_hex(8)) or Turn(body, ())
    dry_run = await convert(app, protocol.paths[0], headers, turn.body)
    if dry_run.request is None:
        counter("prefills_ahead_dropped").labels("refused").inc()
        return Response(dry_run.answer, dry_run.status, media_type="application/json")
    ids = certain_ids(dry_run.request, turn, manager.tokenizer.decode)
    if ids is None:
        return _error("the prompt is not of text alone")
    longest = manager.max_req_input_len
    if len(ids) > longest:
        return _error(f"the prompt has {len(ids)} tokens, and this engine takes {longest}")
    context = dry_run.context
    context.pins = tuple(pin for pin in context.pins if pin[0] <= len(ids))  # also WHOLE_PROMPT
    name = conversation_name(context) or secrets.token_hex(8)
    return Job(name, ids, dry_run.request, context, purpose=context.purpose or "prefill")


def _so_far(begun: list[Job], why: str) -> Mapping[str, Any]:
    if not begun:
        names = ("prompt_tokens", "cached_tokens", "loaded_tokens", "prefilled_tokens", "segments")
        counts = dict.fromkeys(names)
        return {**counts, "complete": False, "why": why}
    (job,) = begun
    return {
        "prompt_tokens": job.total,
        "cached_tokens": job.cached_tokens,
        "loaded_tokens": job.loaded_tokens,
        "prefilled_tokens": job.prefilled_tokens,
        "segments": len(job.context.chain.hashes),
        "complete": job.is_complete,
        "why": why,
    }


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> JSONResponse:
    """An error; the error middleware gives it its protocol's shape."""
    is_busy = status == HTTPStatus.TOO_MANY_REQUESTS
    headers = {"retry-after": str(_RETRY_AFTER_S)} if is_busy else None
    return JSONResponse({"error": {"message": message}}, status, headers)


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
            job = await _job(app, manager, number, orjson.loads(line))
        except ValueError as error:
            raise ValueError(f"shared_prefixes={path!r}: line {number}: {error}") from error
        prefixes().add(job.ids, job.request.lora_path)
        jobs.append(job)
    return jobs


async def _job(app: Any, manager: TokenizerManager, number: int, body: Any) -> Job:
    protocol = detect({}, None, body)
    if protocol is None:
        raise ValueError("is a request of no known protocol")
    job = await read_job(app, manager, protocol, _warmup_headers(number), body)
    if isinstance(job, Response):
        raise ValueError(f"was rejected: {bytes(job.body).decode()}")
    if job.request.cache_salt or job.request.extra_key:
        raise ValueError("has a cache_salt or an extra_key, which cannot be shared")
    if job.request.contains_mm_input():
        raise ValueError("is of more than text")
    return job


def _at_rank(job: Job, rank: int) -> Job:
    """The same job for this data-parallel rank."""
    context = replace(job.context, rank=rank)
    return Job(f"{job.name}#{rank}", job.ids, job.request, context, purpose=job.purpose)


def _warmup_headers(number: int) -> Headers:
    """Those of a request of an operator's file, by which log lines name its line."""
    ours = {REQUEST_ID_HEADER: f"line-{number}", PURPOSE_HEADER: "warmup"}
    return [(name.encode(), value.encode()) for name, value in ours.items()]


def _lines(path: str | None) -> list[bytes]:
    return Path(path).read_bytes().splitlines() if path else []
