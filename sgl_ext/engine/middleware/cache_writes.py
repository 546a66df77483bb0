"""Completes the usage of OpenAI's answers with what a request's marks wrote to the cache.

    "prompt_tokens_details": {"cached_tokens": 3900}
    "prompt_tokens_details": {"cached_tokens": 3900, "cache_write_tokens": 1310}

`granted_ttl_s` follows if the request states a longer TTL than the server grants. The answers of
requests without marks pass unchanged, as do errors. Generated text cannot be mistaken for usage,
because JSON escapes the quotation marks inside it.
"""

import re
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from sgl_ext.engine.core.request_context import RequestContext, context_in
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.usage import written_tokens

_PATHS = frozenset((*CHAT.paths, *RESPONSES.paths))
_DETAILS = re.compile(
    rb'("(?:prompt|input)_tokens":\s*(\d+).{0,200}?'
    rb'"(?:prompt|input)_tokens_details":\s*\{"cached_tokens":\s*(\d+))'
    rb'(?:,\s*"cache_write_tokens":\s*\d+)?'
)


class CacheWritesMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})
        start: Any = None  # the head of a whole answer, whose length changes
        parts: list[bytes] = []
        context: RequestContext | None = None

        async def complete(message: Any) -> None:
            nonlocal start, context
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
                found = context_in(scope)
                if found is not None and (found.pins or found.marks.clamped_s):
                    context = found
                    kind = Headers(raw=message["headers"]).get("content-type", "")
                    if "event-stream" not in kind:
                        start = message
                        return
            elif context is not None and message["type"] == "http.response.body":
                data = message.get("body", b"")
                if start is None:
                    message = {**message, "body": completed(data, context)}
                else:
                    parts.append(data)
                    if message.get("more_body", False):
                        return
                    body = completed(b"".join(parts), context)
                    headers = MutableHeaders(raw=list(start["headers"]))
                    headers["content-length"] = str(len(body))
                    await send({**start, "headers": headers.raw})
                    message = {**message, "body": body}
            await send(message)

        await self.app(scope, receive, complete)


def completed(data: bytes, context: RequestContext) -> bytes:
    """An answer, or an event of one, with what was written in its usage, if it has any."""
    if b'_tokens_details":' not in data:
        return data

    def add(usage: re.Match[bytes]) -> bytes:
        prompt, cached = int(usage[2]), int(usage[3])
        pins = [prompt if tokens < 0 else tokens for tokens, _ in context.pins]
        added = b'%b,"cache_write_tokens":%d' % (usage[1], written_tokens(pins, prompt, cached))
        if granted_s := context.marks.clamped_s:
            added += b',"granted_ttl_s":%g' % granted_s
        return added

    return _DETAILS.sub(add, data)
