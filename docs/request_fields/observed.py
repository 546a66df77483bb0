"""What becomes of a request: what the model and its sampler get, and what the cache does.

The engine's request hook reads it, and SGLang's own classes parse and convert it, without a model.
"""

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson
from fastapi import HTTPException
from pydantic import ValidationError
from sgl_ext_cpu import front_end
from starlette.requests import Request

from sgl_ext.engine.core.request_context import context_of
from sgl_ext.engine.http.request_hook import read_body
from sgl_ext.engine.http.translation import keep_deferral, model_of
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.field_types import find_wrong_field
from sgl_ext.reading.rewriting import translate

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
COMPLETIONS = "/v1/completions"
# SGLang parses them, and nothing reads them. Ids are new for each request.
_UNUSED = {"max_tool_calls", "metadata", "model", "request_id", "rid", "service_tier", "truncation"}
_UNUSED |= {"user", "safety_identifier"}


class Observed(NamedTuple):
    """What becomes of one request.

    meaning: what the model, its sampler and the cache get. counts: what was translated. error: why
    the request is refused; "" if it is not.
    """

    meaning: bytes = b""
    counts: tuple[str, ...] = ()
    error: str = ""


class Observer:
    """Observes requests for a model that reads text, thinks and calls tools."""

    def __init__(self) -> None:
        front_end.load()
        self._protocol = import_module("sglang.srt.entrypoints.openai.protocol")
        self._anthropic = import_module("sglang.srt.entrypoints.anthropic.protocol")
        manager = front_end.Manager(front_end.bare_tokenizer("{{ messages }}"), "qwen25", "qwen3")
        with front_end.settings():
            made = front_end.make(manager, _observed_by)
        self._messages, self._chat = made.messages, made.responses
        state = SimpleNamespace(
            openai_serving_chat=made.chat, openai_serving_responses=made.responses
        )
        self._app = SimpleNamespace(state=state)
        self._seen: dict[bytes, Observed] = {}

    async def observe(self, path: str, body: dict[str, Any]) -> Observed:
        """What becomes of a request to a path."""
        key = path.encode() + orjson.dumps(body)
        if key not in self._seen:
            self._seen[key] = await self._observe(path, body)
        return self._seen[key]

    async def _observe(self, path: str, body: dict[str, Any]) -> Observed:
        if wrong := find_wrong_field(body):
            return Observed(error=wrong.message)
        counts = tuple(sorted(translate(of_path(path), body, model_of(self._chat)).counts))
        request = self._request(path, body)
        try:
            for_sglang = await read_body(_parsed, request)
            meaning = self._meaning(path, for_sglang)
        except HTTPException as error:
            detail = error.detail
            said = detail["message"] if isinstance(detail, dict) else str(detail)
            return Observed(counts=counts, error=said)
        except (ValidationError, ValueError) as error:
            return Observed(counts=counts, error=str(error))
        context = context_of(request)
        assert context is not None
        cache = (context.marks, context.importance, context.session, context.is_last)
        seen = orjson.dumps([meaning, repr(cache)], default=str, option=orjson.OPT_SORT_KEYS)
        return Observed(seen, counts)

    def _request(self, path: str, body: dict[str, Any]) -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": orjson.dumps(body)}

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "app": self._app}
        return Request({**scope, "query_string": b"", "server": ("engine", 80)}, receive)

    def _meaning(self, path: str, body: dict[str, Any]) -> Any:
        """What SGLang makes of a body."""
        if path == MESSAGES:
            request = self._anthropic.AnthropicMessagesRequest.model_validate(body)
            converted = self._messages._convert_to_chat_completion_request(request)
            return _used(converted), request.stream
        if path == CHAT:
            return _used(self._protocol.ChatCompletionRequest.model_validate(body))
        if path == COMPLETIONS:
            return _used(self._protocol.CompletionRequest.model_validate(body))
        request = self._protocol.ResponsesRequest.model_validate(body)
        convert = type(self._chat)._response_tools_to_chat_tools
        converted = {
            "input": self._chat._construct_input_messages(request),
            "tools": [tool.model_dump() for tool in keep_deferral(convert, self._chat, request)],
        }
        return _used(request) | converted


def _observed_by(kind: Any) -> Any:
    class Serving(kind):  # type: ignore[misc]
        def supports_native_reasoning_history(self) -> bool:
            return True

        def apply_reasoning_enabled(self, request: Any, enabled: bool) -> None:
            request.chat_template_kwargs = {"enable_thinking": enabled}

        def _resolve_inline_system_support(self) -> bool:
            return True

    return Serving


async def _parsed(request: Any) -> Any:
    return orjson.loads(await request.body())


def _used(request: Any) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):  # of fields that hold what they were given
        dump = request.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in dump.items() if name not in _UNUSED}
