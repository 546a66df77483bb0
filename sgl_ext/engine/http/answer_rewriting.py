"""Rewrites the answers of SGLang's application on their way to the client.

stream         each piece by itself
whole answer   when all of it is there, as its length changes
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders


class Rewriter(Protocol):
    """How one answer is rewritten. changes_whole: whether it changes a whole answer."""

    @property
    def changes_whole(self) -> bool: ...
    def event(self, data: bytes) -> bytes: ...
    def whole(self, data: bytes) -> bytes: ...


def rewriting(send: Any, begin: Callable[[], Rewriter | None]) -> Any:
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
