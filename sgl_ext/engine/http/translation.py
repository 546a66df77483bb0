"""Bodies in the words that SGLang knows, for the model that this engine serves.

See `sgl_ext.requests.translation`. A request's segments and marks are read from the body as sent,
which the balancer saw, too; SGLang gets the translated body.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.host_cache.message_cache import convert
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.translation.responses import namespaced_names
from sgl_ext.requests.protocol import Model, Protocol
from sgl_ext.requests.translation import translate


def model_of(serving: Any) -> Model:
    """What the model behind a front end of SGLang's can take; all there is if it does not say."""
    if serving is None:
        return Model()
    is_harmony = getattr(serving, "use_harmony", False)
    return Model(
        thinks=bool(serving.reasoning_parser),
        sees=bool(serving.tokenizer_manager.model_config.is_multimodal),
        takes_system_anywhere=bool(serving.supports_inline_system),
        takes_namespaces=serving.tool_call_parser == "muse"
        or getattr(serving, "_translates_tools", False),
        runs_tools=is_harmony and getattr(serving, "tool_server", None) is not None,
        has_phases=is_harmony or serving.tool_call_parser == "muse",
    )


def for_sglang(request: Any, protocol: Protocol, path: str, body: Any) -> Any:
    """The body that SGLang gets for one that an HTTP request had; what is translated is counted."""
    if protocol.translate is not None and not isinstance(body, dict):
        from fastapi import HTTPException

        raise HTTPException(HTTPStatus.BAD_REQUEST, "body: must be a JSON object")
    app = getattr(request, "scope", {}).get("app")
    name = "openai_serving_responses" if protocol is RESPONSES else "openai_serving_chat"
    serving = None if app is None else getattr(app.state, name, None)
    translated = translate(protocol, body, model_of(serving))
    for what, times in translated.counts.items():
        counter("translated").labels(path, what).inc(times)
    return translated.body


def translated_copy(chat: Any, path: str, body: Any) -> Any:
    """The same for an altered copy of a body that `chat` renders to learn from it; not counted."""
    return translate(of_path(path), body, model_of(chat)).body


async def name_namespaces(
    original: Any, serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """Around `OpenAIServingResponses.create_responses`: calls of tools that stood in a namespace
    are answered by their own names, as SGLang does for models that know no namespace."""
    context = None if raw_request is None else getattr(raw_request.state, "context", None)
    if context is not None and not model_of(serving).takes_namespaces:
        names = namespaced_names(context.body)
        if names:
            request._tool_state = sglang_api.ResponseToolState(names=names)
    return await original(serving, request, raw_request)


def join_answers(original: Any, serving: Any, request: Any) -> Any:
    """Around `AnthropicServing._convert_to_chat_completion_request`: what the model said in one
    turn, thinking and text, reads as it was said. Of messages that are known nothing is done.

    SGLang makes parts of it, and joins these by a blank for templates that take texts alone: so
    no answer with thinking was the same again in the next turn's prompt, nor in the cache."""
    return convert(partial(_joined, original), serving, request)


def _joined(original: Any, serving: Any, request: Any) -> Any:
    chat = original(serving, request)
    for message in chat.messages:
        parts = message.content if message.role == "assistant" else None
        if isinstance(parts, list) and parts and all(part.type == "text" for part in parts):
            message.content = "".join(part.text for part in parts)
    return chat


def whole_budget(original: Any, request: Any, *args: Any, **kw: Any) -> Any:
    """Around `ResponsesRequest.to_sampling_params`: an answer may have all the tokens asked for.

    SGLang takes two off, for tokens that no engine adds."""
    params = original(request, *args, **kw)
    if request.max_output_tokens is not None and params["max_new_tokens"] is not None:
        params["max_new_tokens"] += 2
    return params
