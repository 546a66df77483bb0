"""`/v1/prefill`: a prompt, complete or not, to be in the cache before it is asked for.

POST     a body of any of three protocols, as it would be posted, as far as it is known.
         `nvext.protocol` or ?protocol= says which (messages, chat, responses) if it does not show.
         {"prompt_tokens", "cached_tokens", "prefilled_tokens", "segments", "complete", "why"}
         ?wait=false: 202 at once, and nothing of what becomes of it
DELETE   ?session=ID   {"deleted": how many}

It is worked on while the engine has nothing else to do, conversion and all. One that waits is
answered when all of it is in the cache, or it is given up, or after WAIT_S with what was
reached; it goes on then. `cached_tokens` is what was there before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.dry_run import Conversion, Headers, convert
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.prefill_ahead.next_turns import certain_ids, name_of
from sgl_ext.engine.prefill_ahead.prefiller import DEADLINE_S, Job, Prefiller
from sgl_ext.protocols.registry import detect
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.requests.next_turn import Turn, partial_turn
from sgl_ext.requests.protocol import Protocol
from sgl_ext.requests.session import OWNER_HEADER

WAIT_S = 30.0
MOST_WAITING = 64
_RETRY_AFTER_S = 5
_logger = logging.getLogger(__name__)


class Warmups:
    """What clients ask to have prefilled. One an engine."""

    def __init__(self, app: Any, manager: Any, prefiller: Prefiller) -> None:
        self._app = app
        self._manager = manager
        self._prefiller = prefiller
        self._converts = asyncio.Lock()
        self._tasks: set[asyncio.Task[Response]] = set()
        self._jobs: dict[str, set[Job]] = {}

    async def post(self, request: Request) -> Response:
        """Takes one in."""
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return _error(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}")
        waits = request.query_params.get("wait", "true")
        if waits not in ("true", "false"):
            return _error(
                HTTPStatus.BAD_REQUEST, f"wait: must be true or false, not {waits[:40]!r}"
            )
        headers = dict(request.headers.items())
        protocol = detect(headers, request.query_params.get("protocol"), body)
        if protocol is None:
            message = (
                "protocol: neither messages, chat nor responses; give one of these as protocol"
            )
            return _error(HTTPStatus.BAD_REQUEST, message)
        if len(self._tasks) >= MOST_WAITING:
            message = f"{len(self._tasks)} prompts wait to be prefilled already"
            return _error(HTTPStatus.TOO_MANY_REQUESTS, message)
        begun: list[Job] = []
        task = asyncio.create_task(self._prefill(protocol, request.headers.raw, body, begun))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if waits == "false":
            return JSONResponse({"queued": True}, HTTPStatus.ACCEPTED)
        left = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({task, left}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        return task.result() if task.done() else JSONResponse(_so_far(begun, "busy"))

    async def warm(self, bodies: Sequence[Any]) -> None:
        """Has prompts prefilled, one after the other, of the bodies of requests."""
        for number, body in enumerate(bodies, start=1):
            protocol = detect({}, None, body)
            told = None if protocol is None else await self._prefill(protocol, (), body, [])
            if told is None or told.status_code != HTTPStatus.OK:
                why = "of no protocol" if told is None else bytes(told.body).decode()
                _logger.warning("sgl-ext: prompt %d to be warmed was refused: %s", number, why)

    async def delete(self, request: Request) -> Response:
        """Gives up those of a session."""
        session = request.query_params.get("session")
        if not session:
            return _error(HTTPStatus.BAD_REQUEST, "session: must be given")
        owner = request.headers.get(OWNER_HEADER)
        jobs = (j for j in self._jobs.get(session, ()) if owner in (None, j.context.owner))
        dropped = sum(self._prefiller.drop(job.name, "deleted") for job in list(jobs))
        return JSONResponse({"deleted": dropped})

    async def _prefill(
        self, protocol: Protocol, headers: Headers, body: Any, begun: list[Job]
    ) -> Response:
        """Converts a body when there is time for it, and has it prefilled by a job, told then."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DEADLINE_S
        turn = partial_turn(protocol, body, secrets.token_hex(8)) or Turn(body, ())
        async with self._converts:
            try:
                await asyncio.wait_for(self._prefiller.idle(), deadline_s - loop.time())
            except TimeoutError:
                counter("prefills_ahead_dropped").labels("busy").inc()
                return JSONResponse(_so_far(begun, "busy"))
            conversion = await convert(self._app, protocol.path, headers, turn.body)
        job = job_of(self._manager, conversion, turn)
        if isinstance(job, Response):
            return job
        begun.append(job)
        self._prefiller.put(job)
        session = job.context.session
        mine = self._jobs.setdefault(session, set())
        mine.add(job)
        try:
            await job.done.wait()
        finally:
            mine.discard(job)
            if not mine:
                self._jobs.pop(session, None)
        return JSONResponse(_so_far(begun, job.why))


def job_of(manager: Any, conversion: Conversion, turn: Turn) -> Job | Response:
    """What there is to prefill of a converted turn, or why nothing is."""
    if conversion.request is None:
        counter("prefills_ahead_dropped").labels("refused").inc()
        return Response(conversion.answer, conversion.status, media_type="application/json")
    ids = certain_ids(conversion, turn, manager.tokenizer.decode)
    if ids is None:
        return _error(HTTPStatus.BAD_REQUEST, "this prompt is not of tokens alone")
    longest = manager.max_req_input_len
    if len(ids) > longest:
        message = f"the prompt has {len(ids)} tokens, and this engine takes {longest}"
        return _error(HTTPStatus.BAD_REQUEST, message)
    context = conversion.context
    context.pins = tuple(
        pin for pin in context.pins if pin[0] == WHOLE_PROMPT or pin[0] <= len(ids)
    )
    return Job(name_of(context) or secrets.token_hex(8), ids, conversion.request, context)


def prefill_routes(warmups: Warmups) -> list[Route]:
    """The routes of an engine that can prefill ahead."""
    return [
        Route(PREFILL, warmups.post, methods=["POST"]),
        Route(PREFILL, warmups.delete, methods=["DELETE"]),
    ]


def _so_far(begun: list[Job], why: str) -> Mapping[str, Any]:
    if not begun:
        counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "prefilled_tokens", "segments"))
        return {**counts, "complete": False, "why": why}
    (job,) = begun
    return {
        "prompt_tokens": job.total,
        "cached_tokens": job.cached_tokens,
        "prefilled_tokens": job.prefilled_tokens,
        "segments": len(job.context.chain.hashes),
        "complete": job.is_complete,
        "why": why,
    }


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: HTTPStatus, message: str) -> JSONResponse:
    busy = status == HTTPStatus.TOO_MANY_REQUESTS
    kind = "rate_limit_error" if busy else "invalid_request_error"
    headers = {"retry-after": str(_RETRY_AFTER_S)} if busy else None
    return JSONResponse({"error": {"message": message, "type": kind}}, status, headers)
