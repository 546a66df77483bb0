"""Paths that the extension adds to SGLang's HTTP server, or answers in its place.

`GET /sgl_ext/events`: the prefix events of the engine's data-parallel rank 0, or `?rank=N`.

`POST /flush_cache?timeout=SECONDS`: empties the cache once no request runs or waits.

SGLang flushes an idle engine alone, and an engine still finishes a request whose answer was sent.
So a flush waits for a short time unless the caller states another one. An engine that does not
become idle answers 409 with the requests that it still has.

`GET /v1/models` and `/v1/models/{id}`, in place of SGLang's: with the context window, and in
Anthropic's shape for its clients.

`/v1/pins`: lists the engine's pins, and deletes them.

GET     {"pins": [{"prefix", "segment", "tokens", "ttl_s", "left_s", "hits", "owner",
                   "session", "rank"}, ...]}
DELETE  ?prefix=HASH or ?session=ID   {"deleted": how many}

A request with `x-sgl-ext-owner` sees and deletes only the pins of that tenant. `rank` is the
data-parallel rank whose cache has the pin; DELETE with `x-sgl-ext-rank` deletes at that rank alone.

`GET /ready`: 200 if the engine takes requests, else 503; 504 if it has been stopped for a while.

A scheduler that is stopped (SIGSTOP, a frozen container) sends nothing, as does one in a long
prefill, so from outside they look alike for a minute. The state of its process shows it at once.
After STOPPED_S the balancer gives the requests that it has there to other engines.

`POST /sgl_ext/settings`: the balancer's way to change settings while the engine runs.

A `Version` of `sgl_ext.settings.reloading`: {"number", "values"}. The answer is {"applied", "why"}.
An older version than the engine has changes nothing. The engine secret, or the address that the
engine listens on, decides who may call it (`secret.py`). Web pages cannot send JSON,
so that they may not.

`GET /sgl_ext/work`: signs of whether the schedulers of a silent engine work.

{"age_s": since the engine began to serve, "page_faults": within a second}

A scheduler that compiles kernels sends nothing for minutes, as does one that hangs. Page faults
tell them apart (`scheduler.silence`). They are those of all processes below this one: schedulers,
and the compilers that these started. On another system than Linux there are none, so that an engine
shows no sign of work.

`POST /v1/responses/input_tokens`: the prompt tokens of the same request to `/v1/responses`.

SGLang has no such path, and takes its name for the id of a response. A request with the body goes
up to its generation, so its prompt is counted that the same request has.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import orjson
import psutil
import zmq
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scheduler.silence import Signs
from sgl_ext.compat.errors import EngineError
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.folder import Outbox, main_process
from sgl_ext.engine.core.request_context import convert
from sgl_ext.engine.http.event_broadcaster import EventBroadcaster
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.sglang_http_types import GenerateReqInput
from sgl_ext.pin_mirror import PATH as PINS
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.protocols.models import (
    ANTHROPIC_HEADER,
    MOST_ON_A_PAGE,
    anthropic_model,
    anthropic_page,
    openai_model,
    page_limit,
)
from sgl_ext.protocols.models import PATH as MODELS
from sgl_ext.protocols.responses import COUNT_RESPONSE, RESPONSES
from sgl_ext.settings.reloading import engine_values, with_values
from sgl_ext.settings.schema import SettingsError
from sgl_ext.wire.events import EVENTS_PATH, SUBSCRIBERS_PATH, Subscribers
from sgl_ext.wire.headers import OWNER_HEADER, RANK_HEADER
from sgl_ext.wire.orders import SETTINGS_PATH, Applied, read_version
from sgl_ext.wire.probes import READY_PATH, WORK_PATH, ProbeAnswer, encode_signs, probe_headers


def event_routes(
    broadcasters: Sequence[EventBroadcaster], subscriber_count: Callable[[], int]
) -> list[Route]:
    """The routes of the streams, one for each rank, and of the number of their readers."""

    async def show_subscribers(_: Request) -> JSONResponse:
        # A balancer reads an engine that drains until the last answer has come: with 0 it may end.
        return JSONResponse(msgspec.to_builtins(Subscribers(subscriber_count())))

    return [
        Route(EVENTS_PATH, _Streams(broadcasters), methods=["GET"]),
        Route(SUBSCRIBERS_PATH, show_subscribers, methods=["GET"]),
    ]


class _Streams:
    """The ASGI application of all streams."""

    def __init__(self, broadcasters: Sequence[EventBroadcaster]) -> None:
        self._by_rank = {str(each.rank): each for each in broadcasters}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rank = QueryParams(scope["query_string"]).get("rank", "0")
        stream = self._by_rank.get(rank)
        if stream is None:
            message = f"rank: this engine has the ranks 0 to {len(self._by_rank) - 1}"
            error = JSONResponse({"error": {"message": message}}, HTTPStatus.NOT_FOUND)
            await error(scope, receive, send)
        else:
            await stream(scope, receive, send)


FLUSH = "/flush_cache"
WAIT_S = 5.0
LIMIT_S = 60.0
_MOST_NAMED = 8


def flush_route() -> Route:
    """The route, in place of SGLang's and with its access level."""
    flush._auth_level = sglang_api.AuthLevel.ADMIN_OPTIONAL  # type: ignore[attr-defined]
    return Route(FLUSH, flush, methods=["GET", "POST"])


async def flush(request: Request) -> Response:
    """Flushes, or answers 409."""
    wait_s = _wait_s(request.query_params.get("timeout"))
    if wait_s is None:
        message = f"timeout: a number of seconds from 0 to {LIMIT_S:g} is expected"
        return JSONResponse({"error": {"message": message}}, HTTPStatus.BAD_REQUEST)
    manager = sglang_api.get_global_state().tokenizer_manager
    result = await manager.flush_cache(timeout_s=wait_s)
    if result.success:
        return PlainTextResponse("Cache flushed.\n")
    names = [str(name) for name in islice(manager.rid_to_state, _MOST_NAMED)]
    pending = len(manager.rid_to_state)
    message = (
        f"the cache was not flushed within {wait_s:g} s; pending requests: {pending}. "
        f"{result.message or 'Wait for them or abort them.'}"
    )
    error = {"message": message, "pending": pending, "requests": names}
    return JSONResponse({"error": error}, HTTPStatus.CONFLICT)


def _wait_s(text: str | None) -> float | None:
    """How long to wait; None if `text` states no time that is allowed."""
    try:
        wait_s = WAIT_S if text is None else float(text)
    except ValueError:
        wait_s = inf
    return wait_s if 0 <= wait_s <= LIMIT_S else None


# When the engine was started: SGLang says the time of the request.
_CREATED = {"created": int(time.time())}


def model_routes() -> list[Route]:
    """The routes: the list, and one model."""
    return [
        Route(MODELS, _list, methods=["GET"]),
        Route(f"{MODELS}/{{model:path}}", _show, methods=["GET"]),
    ]


async def _list(request: Request) -> Response:
    if not _is_anthropic(request):
        return JSONResponse({"object": "list", "data": await _models(openai_model)})
    query = request.query_params
    limit = page_limit(query.get("limit"))
    if limit is None:
        message = f"limit: must be a number from 1 to {MOST_ON_A_PAGE}"
        return _engine_error(EngineError(400, message, "limit"))
    page = anthropic_page(
        await _models(anthropic_model),
        after_id=query.get("after_id"),
        before_id=query.get("before_id"),
        limit=limit,
    )
    return JSONResponse(page)


async def _show(request: Request) -> Response:
    name = request.path_params["model"]
    models = await _models(anthropic_model if _is_anthropic(request) else openai_model)
    for model in models:
        if model["id"] == name:
            return JSONResponse(model)
    message = f"model: {name} does not exist; GET {MODELS} lists those that do"
    return _engine_error(EngineError(404, message, "model"))


async def _models(shape: Callable[[dict[str, Any], int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The model, and the LoRA adapters that are loaded, which have the model's window."""
    window_tokens = sglang_api.get_global_state().tokenizer_manager.model_config.context_len
    cards = (await sglang_api.available_models()).data
    return [shape(card.model_dump() | _CREATED, window_tokens) for card in cards]


def _is_anthropic(request: Request) -> bool:
    return ANTHROPIC_HEADER in request.headers


def _engine_error(error: EngineError) -> Response:
    """An error, which the middleware then shapes."""
    document = {"error": {"message": error.message, "param": error.param}}
    return JSONResponse(document, error.status)


_TIMEOUT_S = 10.0
_POLL_S = 0.02


def pin_routes(pins: Sequence[PinMirror], outboxes: Sequence[Outbox]) -> list[Route]:
    """The routes, which answer from the pins of each rank and send deletions to its scheduler."""

    async def show(request: Request) -> JSONResponse:
        owner = request.headers.get(OWNER_HEADER)
        now_s = time.monotonic()
        rows = [r | {"rank": n} for n, each in enumerate(pins) for r in each.rows(now_s, owner)]
        return JSONResponse({"pins": rows})

    async def delete(request: Request) -> JSONResponse:
        query = request.query_params
        prefix, session = query.get("prefix"), query.get("session")
        if not prefix and not session:
            return _error(HTTPStatus.BAD_REQUEST, "prefix or session: one of them must be given")
        owner, rank = request.headers.get(OWNER_HEADER), request.headers.get(RANK_HEADER)
        named = [
            [] if rank not in (None, str(number)) else each.named(prefix, session, owner)
            for number, each in enumerate(pins)
        ]
        for names, outbox in zip(named, outboxes, strict=True):
            if names:
                outbox.unpin(names)
        for _ in range(int(_TIMEOUT_S / _POLL_S)):
            if not any(n in each for names, each in zip(named, pins, strict=True) for n in names):
                return JSONResponse({"deleted": sum(map(len, named))})
            await asyncio.sleep(_POLL_S)
        return _error(HTTPStatus.GATEWAY_TIMEOUT, "the scheduler did not delete them in time")

    return [Route(PINS, show, methods=["GET"]), Route(PINS, delete, methods=["DELETE"])]


def _error(status: HTTPStatus, message: str) -> JSONResponse:
    """An error; the error middleware gives it its protocol's shape."""
    return JSONResponse({"error": {"message": message}}, status)


STOPPED_S = 3.0


def ready_route(extension: HttpExtension, ranks: int = 1, role: str = "") -> Route:
    """The route, in place of SGLang's. ranks: how many data-parallel ranks there are. role: as of
    `ProbeAnswer`."""
    readiness = Readiness()

    async def ready(request: Request) -> Response:
        manager = sglang_api.get_global_state().tokenizer_manager
        takes_requests = manager.is_ready() and extension.workers.serve_all()
        status = readiness.status(takes_requests=takes_requests)
        headers = probe_headers(ProbeAnswer(extension.settings_number, ranks, role))
        return Response(None, status, headers)

    return Route(READY_PATH, ready, methods=["GET"])


class Readiness:
    """children: lists the engine's other processes. SGLang ends the engine if one of them ends."""

    def __init__(
        self,
        children: Callable[[], list[Any]] = lambda: main_process().children(recursive=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list = children
        self._clock = clock
        self._children: list[Any] = []
        self._since_s: float | None = None

    def status(self, *, takes_requests: bool) -> HTTPStatus:
        """The status to answer. takes_requests: what SGLang says."""
        if takes_requests and not self._children:  # listing them takes milliseconds
            self._children = self._list()
        if not any(map(_is_stopped, self._children)):
            self._since_s = None
            return HTTPStatus.OK if takes_requests else HTTPStatus.SERVICE_UNAVAILABLE
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        is_long = now_s - self._since_s >= STOPPED_S
        return HTTPStatus.GATEWAY_TIMEOUT if is_long else HTTPStatus.SERVICE_UNAVAILABLE


def _is_stopped(process: Any) -> bool:
    """A process that a debugger traces is not: profilers stop it for a moment."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def settings_route(
    extension: HttpExtension, outboxes: Sequence[Outbox], unreached: str = ""
) -> Route:
    """The route, which applies settings in this process and has the schedulers apply them.
    unreached: which schedulers no order reaches."""

    async def change(request: Request) -> JSONResponse:
        if request.headers.get("content-type") != "application/json":
            return _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
        try:
            version = read_version(await request.body())
            values = engine_values(version)
            settings = with_values(extension.settings, values)
        except (msgspec.MsgspecError, SettingsError) as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        if version.number > extension.settings_number:
            try:
                for outbox in outboxes:
                    outbox.change(values)
            except zmq.Again:
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, "the scheduler reads no orders")
            extension.change(settings, version.number)
            if None in await extension.workers.tell(request.scope, await request.body()):
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, "a tokenizer worker took no settings")
        return JSONResponse(msgspec.to_builtins(Applied(not unreached, unreached)))

    return Route(SETTINGS_PATH, change, methods=["POST"])


SAMPLE_S = 1.0
# Of /proc/PID/stat, after the name: minor and major faults, each with those of ended children.
_FAULTS = slice(7, 11)


def work_route() -> Route:
    """The route. The engine's age is counted from now."""
    started_s = time.monotonic()

    async def work(_: Request) -> Response:
        faults = await count_faults(faults_by_process, SAMPLE_S)
        signs = Signs(time.monotonic() - started_s, faults)
        return Response(encode_signs(signs), media_type="application/json")

    return Route(WORK_PATH, work, methods=["GET"])


async def count_faults(read: Callable[[], Mapping[int, int]], sample_s: float) -> int:
    """The page faults of processes while `sample_s` go by. read: lists the total of each."""
    before = await asyncio.to_thread(read)
    await asyncio.sleep(sample_s)
    after = await asyncio.to_thread(read)
    return sum(max(total - before.get(pid, 0), 0) for pid, total in after.items())


def faults_by_process() -> dict[int, int]:
    """The page faults so far of each process below this one, and of its ended children."""
    found = {}
    for process in main_process().children(recursive=True):
        with suppress(OSError, ValueError):  # it has ended, or this is not Linux
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            found[process.pid] = sum(map(int, stat.rpartition(")")[2].split()[_FAULTS]))
    return found


# Nothing is generated, streamed or stored.
_INSTEAD = {"stream": False, "store": False, "background": False}


def count_route() -> Route:
    """The route."""

    async def count(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return _error(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}")
        if not isinstance(body, dict):
            return _error(HTTPStatus.BAD_REQUEST, "body: must be a JSON object")
        manager = sglang_api.get_global_state().tokenizer_manager
        asked = {"model": manager.served_model_name, **body, **_INSTEAD}
        dry_run = await convert(request.app, RESPONSES.paths[0], request.scope["headers"], asked)
        if dry_run.request is None:
            return Response(dry_run.answer, dry_run.status, media_type="application/json")
        tokens = _tokens_of(dry_run.request, manager.tokenizer)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    return Route(COUNT_RESPONSE.paths[0], count, methods=["POST"])


def _tokens_of(request: GenerateReqInput, tokenizer: Any) -> int:
    if request.input_ids is not None:
        return len(request.input_ids)
    return len(tokenizer.encode(request.text))
