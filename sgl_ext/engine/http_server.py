"""Puts the extension into SGLang's HTTP server: middleware, routes, and what runs beside it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import aiohttp
from starlette.datastructures import Headers

from sgl_ext.compat import errors, openai_answers, window
from sgl_ext.compat.errors import EngineError
from sgl_ext.compat.templates import check_template, log_template, template_route
from sgl_ext.engine import sglang_api, sglang_check, topology
from sgl_ext.engine.arguments import caches, in_effect
from sgl_ext.engine.core.counters import background_failed, counter
from sgl_ext.engine.core.folder import Outbox
from sgl_ext.engine.core.request_context import context_in, current_dry_run
from sgl_ext.engine.core.workers import Workers, share_work
from sgl_ext.engine.http import secret as secret_check
from sgl_ext.engine.http.answer_rewriting import RewritingMiddleware
from sgl_ext.engine.http.extension import HttpExtension, gauging, install, installed
from sgl_ext.engine.http.pin_placement import USAGE_PATHS, WrittenUsage, log_limits
from sgl_ext.engine.http.routes import (
    count_route,
    event_routes,
    flush_route,
    model_routes,
    pin_routes,
    ready_route,
    settings_route,
    work_route,
)
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.engine.sglang_types import ResolvedArgs, ServerArgs
from sgl_ext.engine.startup import await_acknowledgements, report_parsers
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.next_turn import LIMIT_ANSWER_BYTES
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.settings.secrets import EngineSecret
from sgl_ext.supervision import CLOCKS, StallMonitor, count_unhandled
from sgl_ext.wire.events import EVENTS_PATH

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
    subprocess_watchdog: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    """Before SGLang's HTTP server runs, after all other processes have begun."""
    await_acknowledgements(scheduler_infos)
    report_parsers(server_args)
    if (count := in_effect().tokenizer_worker_num) > 1:
        sglang_check.verify(sglang_api.WORKERS, ())
        share_work(count, subprocess_watchdog)
        return
    if tokenizer_manager is not None:
        check_template(tokenizer_manager, template_manager)
    extend_app(server_args, Workers())


def extend_app(server_args: ServerArgs, of_engine: Workers) -> None:
    """Extends the application of this process, before it serves."""
    args, app = in_effect(), sglang_api.app
    ranks = caches(args)
    extension = HttpExtension(EngineSettings.from_environment(), ranks, of_engine)
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
    # What is added later is around it: the secret is checked before a body is read for another.
    if of_engine.count > 1:
        app.add_middleware(WorkerMiddleware, workers=of_engine)
    secret = EngineSecret(extension.settings.engine_secret)
    secret_check.install(app, server_args.url(), secret)
    app.add_middleware(InFlightMiddleware, extension=extension)
    broadcasters = extension.broadcasters
    for broadcaster in broadcasters:
        broadcaster.degraded = extension.degraded
    outboxes = [Outbox(rank) for rank in range(ranks)] if of_engine.is_lead else []
    app.router.routes[:0] = [
        *event_routes(broadcasters, lambda: extension.subscriber_count),
        flush_route(),
        ready_route(extension, ranks, _role(args)),
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
            for broadcaster in broadcasters if of_engine.is_lead else ():
                await stack.enter_async_context(broadcaster.listening())
            state = await stack.enter_async_context(original(application))
            served = sglang_api.get_global_state()
            manager = served.tokenizer_manager
            if of_engine.count > 1:
                check_template(manager, served.template_manager)  # no other process has a tokenizer
                # SGLang ends such a process by an exception in its event loop.
                manager.set_server_stop_hook(partial(signal.raise_signal, signal.SIGINT))
            window.announce(manager)
            log_template(application)
            serving = extension.serving(application, manager)
            peers = of_engine.serving(application, extension.on_cleared)
            async with serving, gauging(extension), peers:
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


class WorkerMiddleware:
    """An ASGI application around another: requests of another worker go there. It reads whole
    bodies, so it stands behind the check of the engine secret."""

    def __init__(self, app: Any, workers: Workers) -> None:
        self.app = app
        self._workers = workers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_http = scope["type"] == "http"
        number = self._workers.of_request(scope) if is_http else self._workers.number
        if number == self._workers.number:
            await self.app(scope, receive, send)
        elif (body := await _body(receive)) is not None:
            relay = asyncio.create_task(self._relay(number, scope, body, send))
            gone = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (gone, relay):
                    task.cancel()
            with suppress(asyncio.CancelledError):
                await relay

    async def _relay(self, number: int, scope: Any, body: bytes, send: Any) -> None:
        try:
            await self._workers.relay(number, scope, body, send)
        except aiohttp.ClientConnectorError:  # it has ended, and so does the engine
            await errors.send_error(scope, EngineError(503, _ENDING), send)


async def _body(receive: Any) -> bytes | None:
    """A request's whole body; None if its client left."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
    return None


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
    if manager.server_status.name == _UNHEALTHY or extension.workers.count == 1:
        await extension.store_all()
    else:
        await extension.workers.drained(extension.store_all)
    try:
        await original(manager)
    finally:
        end_streams()
