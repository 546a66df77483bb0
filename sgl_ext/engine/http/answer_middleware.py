"""Listens to answers, so that what comes after them can be prefilled. Changes nothing of them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sgl_ext.engine.core.dry_run import is_copy
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.answers import LIMIT_BYTES


class AnswerTap:
    """An ASGI application around another, that keeps the bytes of answers somebody wants."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        turns: NextTurns | None = None
        if scope["type"] == "http" and of_path(scope["path"]).conversation and not is_copy():
            turns = getattr(scope["app"].state, "sgl_ext_next_turns", None)
        if turns is None:
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        heard = _Heard()

        async def tapped(message: Any) -> None:
            await send(message)
            context = state.get("context")
            if message["type"] == "http.response.start":
                heard.begin(message, is_wanted=context is not None and turns.wants(context))
            elif heard.take(message):
                turns.answered(scope["headers"], context, b"".join(heard.parts), heard.is_stream)

        await self.app(scope, receive, tapped)


class _Heard:
    """An answer's parts so far."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_stream = False
        self._size = 0
        self._is_kept = False

    def begin(self, start: Any, *, is_wanted: bool) -> None:
        """Its status and headers."""
        kinds = [v for name, v in start.get("headers", ()) if name.lower() == b"content-type"]
        self.is_stream = any(b"event-stream" in kind for kind in kinds)
        self._is_kept = is_wanted and start["status"] == HTTPStatus.OK

    def take(self, part: Any) -> bool:
        """One more part of it; whether it was the last of an answer that was kept whole."""
        body = part.get("body", b"")
        self._size += len(body)
        if self._size > LIMIT_BYTES:
            self._is_kept = False
            self.parts.clear()
        elif self._is_kept and body:
            self.parts.append(bytes(body))
        return self._is_kept and not part.get("more_body", False)
