"""Puts the extension into SGLang's HTTP server: middleware, routes, and what runs beside it."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from itertools import islice
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
import orjson
import psutil
import zmq
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scheduler.silence import Signs
from sgl_ext.compat import errors, openai_answers, window
from sgl_ext.compat.errors import EngineError
from sgl_ext.compat.templates import check_template, log_template, template_route
from sgl_ext.engine import sglang_api, sglang_check, topology
from sgl_ext.engine.arguments import caches, in_effect
from sgl_ext.engine.core.counters import background_failed, counter
from sgl_ext.engine.core.folder import Outbox
from sgl_ext.engine.core.request_context import RequestContext, context_in, convert, current_dry_run
from sgl_ext.engine.http import secret as secret_check
from sgl_ext.engine.http.event_broadcaster import EventBroadcaster
from sgl_ext.engine.http.extension import HttpExtension, gauging, install, installed
from sgl_ext.engine.http.pin_placement import USAGE_PATHS, WrittenUsage, log_limits
from sgl_ext.engine.sglang_http_types import GenerateReqInput, TokenizerManager
from sgl_ext.engine.sglang_types import ResolvedArgs, ServerArgs
from sgl_ext.engine.startup import await_acknowledgements, report_parsers
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
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import COUNT_RESPONSE, RESPONSES
from sgl_ext.reading.next_turn import LIMIT_ANSWER_BYTES
from sgl_ext.settings.reloading import engine_values, with_values
from sgl_ext.settings.schema import EngineSettings, SettingsError
from sgl_ext.settings.secrets import EngineSecret
from sgl_ext.supervision import CLOCKS, StallMonitor, count_unhandled
from sgl_ext.wire.events import EVENTS_PATH, SUBSCRIBERS_PATH, Subscribers
from sgl_ext.wire.headers import OWNER_HEADER, RANK_HEADER
from sgl_ext.wire.orders import SETTINGS_PATH, Applied, read_version
from sgl_ext.wire.probes import READY_PATH, WORK_PATH, ProbeAnswer, encode_signs, probe_headers

_SIGTERM_POLL_S = 0.2
_UNHEALTHY = "UnHealthy"
_REMOTE = "its ranks on other nodes keep pin, aging and preemption settings"
_ENDING = "This engine is shutting down."


def extend(
    server_args: ServerArgs,
    tokenizer_manager: TokenizerManager | None = None,
    template_manager: Any = None,
    port_args: Any = None,
    scheduler_infos: Sequence[Any] = (),
    *_: Any,
    **__: Any,
) -> None:
    """Before SGLang's HTTP server runs, after all other processes have begun."""
    await_acknowledgements(scheduler_infos)
    report_parsers(server_args)
    if tokenizer_manager is not None:
        check_template(tokenizer_manager, template_manager)
    args, app = in_effect(), sglang_api.app
    ranks = caches(args)
    extension = HttpExtension(EngineSettings.from_environment(), ranks)
    install(extension)
    less = topology.features(topology.degraded(topology.facts_of(server_args)))
    extension.degraded = (*less, *sglang_check.groups_off())
    app.add_middleware(AnswerMiddleware, extension=extension)
    for paths, rewriter_of in (
        (USAGE_PATHS, WrittenUsage.of),
        (openai_answers.PATHS, openai_answers.Choices.of),
    ):
        app.add_middleware(RewritingMiddleware, paths=paths, rewriter_of=rewriter_of)
    errors.install(app)
    secret = EngineSecret(extension.settings.engine_secret)
    secret_check.install(app, server_args.url(), secret)
    app.add_middleware(InFlightMiddleware, extension=extension)
    broadcasters = extension.broadcasters
    for broadcaster in broadcasters:
        broadcaster.degraded = extension.degraded
    outboxes = [Outbox(rank) for rank in range(ranks)]
    app.router.routes[:0] = [
        *event_routes(broadcasters, lambda: extension.subscriber_count),
        flush_route(),
        ready_route(lambda: extension.settings_number, ranks, _role(args)),
        settings_route(extension, outboxes, _REMOTE if ranks > 1 < args.nnodes else ""),
        *pin_routes([each.pins for each in broadcasters], outboxes),
        *model_routes(),
        count_route(),
        template_route(),
        work_route(),
    ]
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        count_unhandled(asyncio.get_running_loop(), background_failed)
        stalls = StallMonitor(_stall_counter())
        stalls.start()
        end_streams_at(signal.SIGINT, signal.SIGTERM)
        async with AsyncExitStack() as stack:
            for broadcaster in broadcasters:
                await stack.enter_async_context(broadcaster.listening())
            state = await stack.enter_async_context(original(application))
            manager = sglang_api.get_global_state().tokenizer_manager
            window.announce(manager)
            log_template(application)
            async with extension.serving(application, manager), gauging(extension):
                log_limits(application)
                yield state
        stalls.stop()

    app.router.lifespan_context = lifespan


def _role(args: ResolvedArgs) -> str:
    """The value of ROLE_HEADER; "" for an engine that both prefills and decodes."""
    if args.disaggregation_mode == "prefill":
        return f"prefill {args.disaggregation_bootstrap_port}"
    return "" if args.disaggregation_mode == "null" else args.disaggregation_mode


def _stall_counter() -> Callable[[str, float], None]:
    stalls = counter("event_loop_stall_seconds")
    of_clock = {clock: stalls.labels(clock) for clock in CLOCKS}
    return lambda clock, seconds: of_clock[clock].inc(seconds)


def end_streams() -> None:
    """Ends the streams of events: at its end, a server waits until every response has ended."""
    for broadcaster in installed().broadcasters:
        broadcaster.close()


def end_streams_at(*numbers: signal.Signals) -> None:
    """Ends them when one of these signals ends the server."""
    for number in numbers:
        ends = signal.getsignal(number)
        if not callable(ends):  # no signal ends it then
            continue

        def end(got: int, frame: FrameType | None, ends: Callable[..., Any] = ends) -> None:
            end_streams()
            ends(got, frame)

        signal.signal(number, end)


class AnswerMiddleware:
    """An ASGI application around another. It collects the answers whose next turn should be
    prefilled ahead, and changes nothing of them."""

    def __init__(self, app: Any, extension: HttpExtension) -> None:
        self.app = app
        self._extension = extension

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        turns = self._extension.next_turns
        has_turns = scope["type"] == "http" and of_path(scope["path"]).conversation is not None
        if turns is None or not has_turns or current_dry_run() is not None:
            await self.app(scope, receive, send)
            return
        answer = bytearray()
        is_stream = is_wanted = False
        scope.setdefault("state", {})

        async def collect(message: Any) -> None:
            nonlocal is_stream, is_wanted
            await send(message)
            context = context_in(scope)
            if context is None:
                return
            if message["type"] == "http.response.start":
                kind = Headers(raw=message["headers"]).get("content-type", "")
                is_stream = "event-stream" in kind
                is_wanted = message["status"] == HTTPStatus.OK and turns.wants(context)
            elif is_wanted:
                answer.extend(message.get("body", b""))
                is_wanted = len(answer) <= LIMIT_ANSWER_BYTES
                if is_wanted and not message.get("more_body", False):
                    turns.predict(scope["headers"], context, bytes(answer), is_stream)

        await self.app(scope, receive, collect)


class InFlightMiddleware:
    """An ASGI application around another. It counts the requests that the engine has.

    SGLang counts what its scheduler generates. It does not know of a request whose body arrives or
    is tokenized, nor of one between two generations. A request that comes when the schedulers end
    already is answered by 503, after which balancers ask another engine: it would wait forever.
    """

    def __init__(self, app: Any, extension: HttpExtension) -> None:
        self.app = app
        self._extension = extension

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self._extension.is_ending:
            await errors.send_error(scope, EngineError(503, _ENDING), send)
            return
        counts = scope["type"] == "http" and scope["path"] != EVENTS_PATH
        self._extension.in_flight += counts
        try:
            await self.app(scope, receive, send)
        finally:
            self._extension.in_flight -= counts


async def await_sigterm(
    original: Callable[[TokenizerManager], Awaitable[None]], manager: TokenizerManager
) -> None:
    """Ends the engine soon after SIGTERM, or after its last request: SGLang looks for both every
    5 s only. An engine that has failed SGLang's health check ends at once."""
    while not manager.gracefully_exit:  # noqa: ASYNC110 - a signal handler of SGLang's sets it
        await asyncio.sleep(_SIGTERM_POLL_S)
    extension = installed()
    while extension.in_flight and manager.server_status.name != _UNHEALTHY:  # noqa: ASYNC110
        await asyncio.sleep(_SIGTERM_POLL_S)
    extension.is_ending = True
    await extension.store_all()
    try:
        await original(manager)
    finally:
        end_streams()


# Rewrites the answers of SGLang's application on their way to the client.
#
# stream         each piece by itself
# whole answer   when all of it is there, as its length changes


class Rewriter(Protocol):
    """How one answer is rewritten. changes_whole: whether it changes a whole answer."""

    @property
    def changes_whole(self) -> bool: ...
    def event(self, data: bytes) -> bytes: ...
    def whole(self, data: bytes) -> bytes: ...


class RewritingMiddleware:
    """An ASGI application around another, which rewrites the answers of some paths.

    rewriter_of: how the answer of a request at a path is rewritten; None: it passes unchanged.
    """

    def __init__(
        self,
        app: Any,
        paths: Collection[str],
        rewriter_of: Callable[[RequestContext, str], Rewriter | None],
    ) -> None:
        self.app = app
        self._paths = paths
        self._rewriter_of = rewriter_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})

        def begin() -> Rewriter | None:
            context = context_in(scope)
            return None if context is None else self._rewriter_of(context, scope["path"])

        await self.app(scope, receive, _rewriting(send, begin))


def _rewriting(send: Any, begin: Callable[[], Rewriter | None]) -> Any:
    """An ASGI `send` that rewrites an answer with status 200.

    begin: how to rewrite it, asked when its head is there; None: it passes unchanged.
    """
    start: Any = None  # the head of a whole answer
    parts: list[bytes] = []
    rewriter: Rewriter | None = None

    async def rewrite(message: Any) -> None:
        nonlocal start, rewriter
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
            rewriter = begin()
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if rewriter is not None and rewriter.changes_whole and "event-stream" not in kind:
                start = message
                return
        elif rewriter is not None and message["type"] == "http.response.body":
            data = message.get("body", b"")
            if start is None:
                message = {**message, "body": rewriter.event(data)}
            else:
                parts.append(data)
                if message.get("more_body", False):
                    return
                body = rewriter.whole(b"".join(parts))
                headers = MutableHeaders(raw=list(start["headers"]))
                headers["content-length"] = str(len(body))
                await send({**start, "headers": headers.raw})
                message = {**message, "body": body}
        await send(message)

    return rewrite


# Paths that the extension adds to SGLang's HTTP server, or answers in its place.
#
# `GET /sgl_ext/events`: the prefix events of the engine's data-parallel rank 0, or `?rank=N`.
#
# `POST /flush_cache?timeout=SECONDS`: empties the cache once no request runs or waits.
#
# SGLang flushes an idle engine alone, and an engine still finishes a request whose answer was sent.
# So a flush waits for a short time unless the caller states another one. An engine that does not
# become idle answers 409 with the requests that it still has.
#
# `GET /v1/models` and `/v1/models/{id}`, in place of SGLang's: with the context window, and in
# Anthropic's shape for its clients.
#
# `/v1/pins`: lists the engine's pins, and deletes them.
#
# GET     {"pins": [{"prefix", "segment", "tokens", "ttl_s", "left_s", "hits", "owner",
#                    "session", "rank"}, ...]}
# DELETE  ?prefix=HASH or ?session=ID   {"deleted": how many}
#
# A request with `x-sgl-ext-owner` sees and deletes only the pins of that tenant. `rank` is the
# data-parallel rank whose cache has the pin; DELETE with `x-sgl-ext-rank` deletes at that rank
# alone.
#
# `GET /ready`: 200 if the engine takes requests, else 503; 504 if it has been stopped for a while.
#
# A scheduler that is stopped (SIGSTOP, a frozen container) sends nothing, as does one in a long
# prefill, so from outside they look alike for a minute. The state of its process shows it at once.
# After STOPPED_S the balancer gives the requests that it has there to other engines.
#
# `POST /sgl_ext/settings`: the balancer's way to change settings while the engine runs.
#
# A `Version` of `sgl_ext.settings.reloading`: {"number", "values"}. The answer is {"applied",
# "why"}. An older version than the engine has changes nothing. The engine secret, or the address
# that the engine listens on, decides who may call it (`secret.py`). Web pages cannot send JSON, so
# that they may not.
#
# `GET /sgl_ext/work`: signs of whether the schedulers of a silent engine work.
#
# {"age_s": since the engine began to serve, "page_faults": within a second}
#
# A scheduler that compiles kernels sends nothing for minutes, as does one that hangs. Page faults
# tell them apart (`scheduler.silence`). They are those of all processes below this one: schedulers,
# and the compilers that these started. On another system than Linux there are none, so that an
# engine shows no sign of work.
#
# `POST /v1/responses/input_tokens`: the prompt tokens of the same request to `/v1/responses`.
#
# SGLang has no such path, and takes its name for the id of a response. A request with the body goes
# up to its generation, so its prompt is counted that the same request has.


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


def ready_route(
    settings_number: Callable[[], int] = lambda: 0, ranks: int = 1, role: str = ""
) -> Route:
    """The route, in place of SGLang's. settings_number: the version of changed settings. ranks: how
    many data-parallel ranks there are. role: as of `ProbeAnswer`."""
    readiness = Readiness()

    async def ready(request: Request) -> Response:
        manager = sglang_api.get_global_state().tokenizer_manager
        status = readiness.status(takes_requests=manager.is_ready())
        headers = probe_headers(ProbeAnswer(settings_number(), ranks, role))
        return Response(None, status, headers)

    return Route(READY_PATH, ready, methods=["GET"])


class Readiness:
    """children: lists the engine's other processes. SGLang ends the engine if one of them ends."""

    def __init__(
        self,
        children: Callable[[], list[Any]] = lambda: psutil.Process().children(recursive=True),
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
    for process in psutil.Process().children(recursive=True):
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
