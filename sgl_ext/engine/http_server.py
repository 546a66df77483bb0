"""Puts the extension into SGLang's HTTP server: middleware, routes, and what starts with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.settings import settings
from sgl_ext.engine.host_cache import message_cache
from sgl_ext.engine.host_cache.token_cache import start as start_token_cache
from sgl_ext.engine.http import error_middleware
from sgl_ext.engine.http.answer_middleware import AnswerTap
from sgl_ext.engine.http.event_broadcaster import PATH, EventStream, hub
from sgl_ext.engine.http.pin_routes import pin_routes
from sgl_ext.engine.prefill_ahead.service import prefilling
from sgl_ext.engine.prefill_ahead.shared_prompts import list_prefixes


def extend(*_: Any, **__: Any) -> None:
    """Before SGLang's HTTP server runs: adds the route, and listens while the server is up."""
    app = sglang_api.http_app

    async def answer(_: Request) -> Response:
        return EventStream(hub())

    app.add_middleware(AnswerTap)
    error_middleware.install(app)
    app.router.routes[:0] = [Route(PATH, answer, methods=["GET"]), *pin_routes(hub().pins)]
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        async with hub().listening(), original(application) as state:
            manager = sglang_api.get_global_state().tokenizer_manager
            limit_bytes = settings().token_cache_bytes
            start_token_cache(manager.tokenizer, limit_bytes - limit_bytes // 4)
            message_cache.start(limit_bytes // 4)
            listed = await list_prefixes(application, manager, settings().shared_prefixes)
            async with prefilling(application, manager, listed) as prefiller:
                if prefiller is not None:
                    hub().on_cleared(partial(prefiller.drop_all, "flushed"))
                yield state

    app.router.lifespan_context = lifespan


def end_streams(*_: Any, **__: Any) -> None:
    """Before uvicorn's shutdown, which waits for every answer to end."""
    hub().close()
