"""Finds out what the engine would generate from for a body, without generating.

A request with the body goes through the application itself: reading, validation, template, tools,
adapters, salt. Where its generation would begin, SGLang's request is noted, and an error is
raised that SGLang answers without a log line. So the result is what a real request of that body
comes to, in each protocol, and a body that SGLang rejects is rejected in SGLang's own words.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from sgl_ext.engine.core.request_context import RequestContext, enter
from sgl_ext.engine.sglang_http_types import GenerateReqInput

_LEFT_OUT = (b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding")

Headers = Iterable[tuple[bytes, bytes]]


class Stopped(ValueError):
    """Ends a dry run where its generation would begin."""


@dataclass
class DryRun:
    """What a body comes to.

    request: SGLang's, with the prompt's tokens; None if SGLang rejected the body.
    context: what the extension knows of it.
    status, answer: of the rejection.
    """

    request: GenerateReqInput | None = None
    context: RequestContext = field(default_factory=RequestContext)
    status: int = 0
    answer: bytes = b""

    def stop(self, request: GenerateReqInput, context: RequestContext) -> None:
        """Notes the first request that would be generated from. Raises Stopped."""
        if self.request is None:
            self.request, self.context = request, replace(context, dry_run=None)
        raise Stopped("this request is a dry run")


async def convert(app: Any, path: str, headers: Headers, body: Any) -> DryRun:
    """What a body, posted to a path of the application, comes to."""
    dry_run = DryRun()
    sent = [(name, value) for name, value in headers if name.lower() not in _LEFT_OUT]
    sent.append((b"content-type", b"application/json"))

    async def post() -> None:
        enter(RequestContext(dry_run=dry_run))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.post(path, headers=sent, content=orjson.dumps(body))
        dry_run.status, dry_run.answer = answer.status_code, answer.content

    await asyncio.create_task(post())  # a task has context variables of its own
    return dry_run
