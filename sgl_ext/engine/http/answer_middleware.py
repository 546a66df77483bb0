"""Collects answers whose next turn should be prefilled ahead. It changes nothing of them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

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
        prefill_ahead = self._extension.prefill_ahead
        has_turns = scope["type"] == "http" and of_path(scope["path"]).conversation is not None
        if prefill_ahead is None or not has_turns or current_dry_run() is not None:
            await self.app(scope, receive, send)
            return
        turns, answer = prefill_ahead.next_turns, _Answer()
        scope.setdefault("state", {})

        async def collect(message: Any) -> None:
            await send(message)
            context = context_in(scope)
            if context is None:
                return
            if message["type"] == "http.response.start":
                answer.begin(message, is_wanted=turns.wants(context))
            elif answer.take(message):
                data = b"".join(answer.parts)
                turns.predict(scope["headers"], context, data, answer.is_stream)

        await self.app(scope, receive, collect)


class _Answer:
    """The parts of an answer so far."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_stream = False
        self._bytes = 0
        self._is_wanted = False

    def begin(self, start: Any, *, is_wanted: bool) -> None:
        """Takes the status and headers."""
        kinds = [v for name, v in start.get("headers", ()) if name.lower() == b"content-type"]
        self.is_stream = any(b"event-stream" in kind for kind in kinds)
        self._is_wanted = is_wanted and start["status"] == HTTPStatus.OK

    def take(self, part: Any) -> bool:
        """Takes the next part; whether it completes a wanted answer of at most LIMIT_BYTES."""
        body = part.get("body", b"")
        self._bytes += len(body)
        if self._bytes > LIMIT_BYTES:
            self._is_wanted = False
            self.parts.clear()
        elif self._is_wanted and body:
            self.parts.append(bytes(body))
        return self._is_wanted and not part.get("more_body", False)
