"""Collects answers whose next turn should be prefilled ahead. It changes nothing of them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers

from sgl_ext.engine.core.request_context import context_in, current_dry_run
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.answers import LIMIT_BYTES


class AnswerMiddleware:
    """An ASGI application around another."""

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
                is_wanted = len(answer) <= LIMIT_BYTES
                if is_wanted and not message.get("more_body", False):
                    turns.predict(scope["headers"], context, bytes(answer), is_stream)

        await self.app(scope, receive, collect)
