"""What the engine would generate from, for a body: its own conversion, stopped before it generates.

A copy of a request goes the way of a real one, through the application itself: context,
validation, template, tools, adapters, salt. Where it would be generated from, it is taken, and
an error raised that SGLang answers quietly. So what is found out here is what a real request of
that body comes to, whatever the protocol does; and a body that is refused is in its own words.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import orjson

_LEFT_OUT = (b"content-length", b"content-type", b"content-encoding", b"transfer-encoding")

Headers = Iterable[tuple[bytes, bytes]]


class Stopped(ValueError):
    """The request that raised it was a copy, and is not generated from."""


class Conversion:
    """What a body came to.

    request: SGLang's own, with the prompt's tokens; None if the body was refused.
    context: what was read off the body, as of any.
    status, answer: of the refusal.
    """

    def __init__(self) -> None:
        self.request: Any = None
        self.context: Any = None
        self.status = 0
        self.answer = b""


_conversion: ContextVar[Conversion | None] = ContextVar("sgl_ext_conversion", default=None)


def is_copy() -> bool:
    """Whether the request whose context this is is a copy."""
    return _conversion.get() is not None


def stop_copy(request: Any, context: Any) -> None:
    """Where a request would be generated from: takes it and raises Stopped if it is a copy."""
    conversion = _conversion.get()
    if conversion is not None:
        if conversion.request is None:
            conversion.request, conversion.context = request, context
        raise Stopped("this request is a copy")


async def convert(app: Any, path: str, headers: Headers, body: Any) -> Conversion:
    """What a body, posted to a path of the application, comes to."""
    conversion = Conversion()
    task_context = contextvars.copy_context()
    task_context.run(_conversion.set, conversion)
    data = orjson.dumps(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            *((name, value) for name, value in headers if name.lower() not in _LEFT_OUT),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(data)),
        ],
        "client": None,
        "server": None,
        "state": {},
        "app": app,
    }
    unread = [{"type": "http.request", "body": data, "more_body": False}]
    ended = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            conversion.status = message["status"]
        else:
            conversion.answer += message.get("body", b"")

    await asyncio.create_task(app(scope, receive, send), context=task_context)
    ended.set()
    return conversion
