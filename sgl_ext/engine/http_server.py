"""Puts the extension into SGLang's HTTP server: middleware, routes, and what runs beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.channels import Outbox
from sgl_ext.engine.http import error_middleware
from sgl_ext.engine.http.answer_middleware import AnswerMiddleware
from sgl_ext.engine.http.event_broadcaster import event_route
from sgl_ext.engine.http.extension import HttpExtension, install, installed
from sgl_ext.engine.http.flush_route import flush_route
from sgl_ext.engine.http.pin_routes import pin_routes
from sgl_ext.settings.schema import EngineSettings


def extend(*_: Any, **__: Any) -> None:
    """Before SGLang's HTTP server runs."""
    extension = HttpExtension(EngineSettings.from_environment())
    install(extension)
    app = sglang_api.app
    app.add_middleware(AnswerMiddleware, extension=extension)
    error_middleware.install(app)
    broadcaster = extension.broadcaster
    pins = pin_routes(broadcaster.pins, Outbox())
    app.router.routes[:0] = [event_route(broadcaster), flush_route(), *pins]
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        async with broadcaster.listening(), original(application) as state:
            manager = sglang_api.get_global_state().tokenizer_manager
            async with extension.serving(application, manager):
                yield state

    app.router.lifespan_context = lifespan


def end_streams(*_: Any, **__: Any) -> None:
    """Before uvicorn's shutdown, which waits until every response has ended."""
    installed().broadcaster.close()
