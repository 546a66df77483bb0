"""Completes Anthropic's answers: what the request's marks wrote to the cache, and the stop reason.

SGLang leaves both out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.http.stop_reasons import with_stop_reason
from sgl_ext.requests.usage import with_cache_creation


async def complete_answer(original: Callable[..., Awaitable[Any]], *args: Any, **kw: Any) -> Any:
    """Around `AnthropicServing._handle_non_streaming`."""
    answer = await original(*args, **kw)
    if answer.status_code != 200:
        return answer
    document = with_stop_reason(orjson.loads(answer.body))
    document["usage"] = _completed(document["usage"])
    return type(answer)(content=document)


def complete_event(original: Callable[[str, str], str], data: str, event_type: str) -> str:
    """Around `_wrap_sse_event`, which writes the events of Anthropic's streams."""
    if event_type == "message_start":
        document = orjson.loads(data)
        document["message"]["usage"] = _completed(document["message"]["usage"])
        data = orjson.dumps(document).decode()
    elif event_type == "message_delta":
        document = orjson.loads(data)
        document["delta"] = with_stop_reason(document["delta"])
        data = orjson.dumps(document).decode()
    return original(data, event_type)


def _completed(usage: dict[str, Any]) -> dict[str, Any]:
    context = current()
    prompt = (usage.get("input_tokens") or 0) + (usage.get("cache_read_input_tokens") or 0)
    pins = () if context is None else context.pins
    return with_cache_creation(usage, [(prompt if t < 0 else t, ttl_s) for t, ttl_s in pins])
