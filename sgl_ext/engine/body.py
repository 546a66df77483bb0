"""The request hook: what every HTTP route of the engine reads as its body passes here once.

SGLang parses each JSON body in `ORJSONRequest.json`, before validation and
before any protocol's conversion, so one hook serves every protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from sgl_ext.engine.settings import EngineSettings
from sgl_ext.requests.facts import ClientFacts
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.system_text import strip_request


@cache
def _strip() -> HeaderStrip:
    return HeaderStrip(EngineSettings.from_environment().strip_headers)


@cache
def _counters() -> tuple[Any, Any]:
    # Made at the first request: prometheus_client must be imported after
    # SGLang has set its multiprocess folder, which is after plugins load.
    from prometheus_client import Counter

    return (
        Counter(
            "sgl_ext_headers_stripped_total",
            "Session headers removed before tokenization",
            ["path"],
        ),
        Counter(
            "sgl_ext_headers_left_total",
            "Header names seen in a body and left: not at the beginning of a system text",
            ["path"],
        ),
    )


async def read_body(original: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Parses the body as SGLang does, strips it, and keeps the client's facts on the request."""
    if hasattr(request, "_json"):
        return request._json
    body = await original(request)
    strip = _strip()
    path = request.url.path
    stripped = strip_request(path, body, strip)
    left = strip.mentions(await request.body()) - stripped.headers
    if stripped.headers or left > 0:
        stripped_total, left_total = _counters()
        stripped_total.labels(path).inc(stripped.headers)
        left_total.labels(path).inc(max(left, 0))
    request.state.client = ClientFacts.from_fields(stripped.fields)
    request._json = stripped.body
    return stripped.body
