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
from starlette.requests import Request

from sgl_ext.engine.core.request_context import context_of
from sgl_ext.engine.http.request_hook import read_body
from sgl_ext.engine.http.translation import keep_deferral, model_of
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.field_types import find_wrong_field
from sgl_ext.requests.rewriting import translate

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
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
        with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
            entrypoints = "sglang.srt.entrypoints"
            self._anthropic = import_module(f"{entrypoints}.anthropic.serving")
            self._protocol = import_module(f"{entrypoints}.openai.protocol")
            self._responses = import_module(f"{entrypoints}.openai.serving_responses")
        config = SimpleNamespace(is_multimodal=False, hf_config=SimpleNamespace(model_type="qwen3"))
        chat = self._responses.OpenAIServingResponses
        # Without a model there is nothing to load: only the attributes that conversions read.
        self._chat = chat.__new__(chat)
        tokenizer = SimpleNamespace(chat_template=None)
        self._chat.tokenizer_manager = SimpleNamespace(model_config=config, tokenizer=tokenizer)
        self._chat.template_manager = SimpleNamespace(python_chat_template=None)
        self._chat.reasoning_parser, self._chat.tool_call_parser = "qwen3", "qwen25"
        self._chat.supports_inline_system = True
        self._chat.use_harmony = self._chat._translates_tools = False
        self._chat.tool_server, self._chat.msg_store = None, {}
        self._chat.enable_response_store = False
        self._chat.supports_native_reasoning_history = lambda: True
        self._chat.apply_reasoning_enabled = _note_thinking
        state = SimpleNamespace(openai_serving_chat=self._chat, openai_serving_responses=self._chat)
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
            serving = self._anthropic.AnthropicServing(self._chat)
            request = serving_request = self._anthropic.AnthropicMessagesRequest.model_validate(
                body
            )
            return _used(
                serving._convert_to_chat_completion_request(serving_request)
            ), request.stream
        if path == CHAT:
            return _used(self._protocol.ChatCompletionRequest.model_validate(body))
        request = self._protocol.ResponsesRequest.model_validate(body)
        convert = type(self._chat)._response_tools_to_chat_tools
        converted = {
            "input": self._chat._construct_input_messages(request),
            "tools": [tool.model_dump() for tool in keep_deferral(convert, self._chat, request)],
        }
        return _used(request) | converted


def _note_thinking(request: Any, enabled: bool) -> None:
    request.chat_template_kwargs = {"enable_thinking": enabled}


async def _parsed(request: Any) -> Any:
    return orjson.loads(await request.body())


def _used(request: Any) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):  # of fields that hold what they were given
        dump = request.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in dump.items() if name not in _UNUSED}
