"""Finds out what the engine would generate from for a body, without generating.

A request with the body goes through the application itself: reading, validation, template, tools,
adapters, salt. Where its generation would begin, SGLang's request is noted, and an error is
raised that SGLang answers without a log line. So the result is what a real request of that body
comes to, in each protocol, and a body that SGLang rejects is rejected in SGLang's own words.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson

from sgl_ext.engine.core.request_context import RequestContext, enter
from sgl_ext.engine.sglang_http_types import GenerateReqInput

_LEFT_OUT = (b"content-length", b"content-type", b"content-encoding", b"transfer-encoding")

Headers = Iterable[tuple[bytes, bytes]]


class Stopped(ValueError):
    """Ends a dry run where its generation would begin."""


class DryRun:
    """What a body comes to.

    request: SGLang's, with the prompt's tokens; None if SGLang rejected the body.
    context: what the extension knows of it.
    status, answer: of the rejection.
    """

    def __init__(self) -> None:
        self.request: GenerateReqInput | None = None
        self.context = RequestContext()
        self.status = 0
        self.answer = b""

    def stop(self, request: GenerateReqInput, context: RequestContext) -> None:
        """Notes the first request that would be generated from. Raises Stopped."""
        if self.request is None:
            self.request, self.context = request, replace(context, dry_run=None)
        raise Stopped("this request is a dry run")


async def convert(app: Any, path: str, headers: Headers, body: Any) -> DryRun:
    """What a body, posted to a path of the application, comes to."""
    dry_run = DryRun()
    task_context = contextvars.copy_context()
    task_context.run(enter, RequestContext(dry_run=dry_run))
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
            dry_run.status = message["status"]
        else:
            dry_run.answer += message.get("body", b"")

    await asyncio.create_task(app(scope, receive, send), context=task_context)
    ended.set()
    return dry_run
