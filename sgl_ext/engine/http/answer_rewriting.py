"""Rewrites the answers of SGLang's application on their way to the client.

stream         each piece by itself
whole answer   when all of it is there, as its length changes
"""

from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders

from sgl_ext.engine.core.request_context import RequestContext, context_in


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
