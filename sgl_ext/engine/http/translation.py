"""Bodies in the words that SGLang knows, for the model that this engine serves.

`sgl_ext.reading.rewriting` translates. A request's segments and marks are read from the body as
sent, which the balancer saw, too; SGLang gets the translated body.
"""

from functools import partial
from http import HTTPStatus
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, context_of, current
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.http.rendering import defers_tools
from sgl_ext.engine.sglang_http_types import AnthropicServing, ServingChat, ServingResponses
from sgl_ext.engine.sglang_types import Original
from sgl_ext.engine.sglang_versions import TESTED, unknown_field
from sgl_ext.limits.bounds import LIMIT_LEVELS, deep_field
from sgl_ext.protocols.anthropic import ANTHROPIC, COUNT_TOKENS
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.tools import allowed_names, namespaced_names, withdrawn_tools
from sgl_ext.reading.protocol import Model, Protocol, objects
from sgl_ext.reading.rewriting import translate

# Values with which a request has its usual meaning.
_NOTHING: tuple[Any, ...] = (None, "", [], {}, "none", {"type": "create"}, ["text"])


def model_of(serving: ServingChat | None) -> Model:
    """What the model that a front end serves can take; everything if there is no front end."""
    if serving is None:
        return Model()
    is_harmony = getattr(serving, "use_harmony", False)
    return Model(
        thinks=bool(serving.reasoning_parser),
        sees=bool(serving.tokenizer_manager.model_config.is_multimodal),
        takes_namespaces=serving.tool_call_parser == "muse"
        or getattr(serving, "_translates_tools", False),
        runs_tools=is_harmony and getattr(serving, "tool_server", None) is not None,
        keeps_tools=installed().settings.keep_tools,
        has_phases=is_harmony or serving.tool_call_parser == "muse",
        defers_tools=defers_tools(serving),
    )


def for_sglang(request: Any, context: RequestContext) -> Any:
    """The body that SGLang gets for that of an HTTP request. Counts what is translated."""
    protocol = context.protocol
    if protocol.translate is not None and not isinstance(context.body, dict):
        from fastapi import HTTPException

        raise HTTPException(HTTPStatus.BAD_REQUEST, "body: must be a JSON object")
    if protocol.translate is not None and (field := deep_field(context.body, protocol.turns_field)):
        from fastapi import HTTPException

        message = f"{field}: nested deeper than {LIMIT_LEVELS} levels"
        raise HTTPException(HTTPStatus.BAD_REQUEST, message)
    _reject_refused(protocol, context.body)
    if protocol in (ANTHROPIC, COUNT_TOKENS):
        context.withdrawn_tools = _withdrawn_tools(context.body)
    app = getattr(request, "scope", {}).get("app")
    name = "openai_serving_responses" if protocol is RESPONSES else "openai_serving_chat"
    serving = None if app is None else getattr(app.state, name, None)
    if protocol is RESPONSES and serving is not None:
        _reject_background(serving, context.body)
    model = model_of(serving)
    context.keeps_tools = model.keeps_tools
    context.allowed_tools = allowed_names(context.body, model)
    translated = translate(protocol, context.body, model)
    for what, times in translated.counts.items():
        counter("translated_parts").labels(context.path, what).inc(times)
    if context.withdrawn_tools:  # they stay in the prompt
        names: set[Any] = {tool.get("name") for tool in objects(translated.body.get("tools"))}
        context.allowed_tools = frozenset(names - context.withdrawn_tools)
    _reject_unknown(protocol, translated.body)
    return translated.body


def _reject_unknown(protocol: Protocol, body: Any) -> None:
    """Rejects what this version of SGLang would ignore, though it changes the answer."""
    if field := unknown_field(protocol.name, body):
        from fastapi import HTTPException

        error = {"message": f"{field}: needs SGLang {TESTED[-1]} or newer", "param": field}
        raise HTTPException(HTTPStatus.BAD_REQUEST, error)


def _reject_refused(protocol: Protocol, body: Any) -> None:
    for field, instead in protocol.refused.items() if isinstance(body, dict) else ():
        # The best of as many as are returned are all of them.
        nothing = (*_NOTHING, body.get("n") or 1) if field == "best_of" else _NOTHING
        if body.get(field) not in nothing:
            from fastapi import HTTPException

            error = {"message": f"{field}: is not supported; {instead}", "param": field}
            raise HTTPException(HTTPStatus.BAD_REQUEST, error)


def _reject_background(serving: ServingResponses, body: Any) -> None:
    """SGLang runs responses in the background only with a flag; its own error names no field."""
    if body.get("background") and not serving.enable_response_store:
        from fastapi import HTTPException

        message = "background: is not supported; read the answer as a stream"
        raise HTTPException(HTTPStatus.BAD_REQUEST, {"message": message, "param": "background"})


def _withdrawn_tools(body: Any) -> frozenset[str]:
    """The tools that a conversation has removed. A choice that names one is rejected."""
    withdrawn = withdrawn_tools(body.get("messages"))
    choice = body.get("tool_choice")
    name = choice.get("name") if isinstance(choice, dict) else None
    if isinstance(name, str) and name in withdrawn:
        from fastapi import HTTPException

        error = {"message": f"tool_choice.name: the tool {name!r} was removed by a tool_removal"}
        raise HTTPException(HTTPStatus.BAD_REQUEST, {**error, "param": "tool_choice.name"})
    return withdrawn


def keep_deferral(original: Original, serving: ServingChat, request: Any) -> Any:
    """Around `OpenAIServingResponses._response_tools_to_chat_tools`, which keeps the mark of
    deferred tools for one format only."""
    tools = original(serving, request)
    deferred = {tool.name for tool in request.tools if tool.defer_loading}
    for tool in tools:
        if tool.function.name in deferred:
            tool.function.defer_loading = True
    return tools


async def name_namespaces(
    original: Original, serving: ServingChat, request: Any, raw_request: Any = None
) -> Any:
    """Around `OpenAIServingResponses.create_responses`: answers calls of tools in a namespace by
    the names that the client gave, as SGLang does for models that know no namespace."""
    context = context_of(raw_request)
    if context is not None and not model_of(serving).takes_namespaces:
        names = namespaced_names(context.body)
        if names:
            request._tool_state = sglang_api.ResponseToolState(names=names)
    return await original(serving, request, raw_request)


def convert_messages(original: Original, serving: AnthropicServing, request: Any) -> Any:
    """Around `AnthropicServing._convert_to_chat_completion_request`: joins the thinking and text of
    each earlier answer as the model generated them, and converts new messages only.

    SGLang makes parts of them, and joins these by a blank for templates that take text alone, so
    the prompt of the next turn would diverge from the cache at each answer with thinking.
    """
    convert, context = partial(_joined, original), current()
    cache = installed().message_cache
    if cache is None or context is None:
        return convert(serving, request)
    return cache.convert(convert, serving, request, context)


def _joined(original: Original, serving: AnthropicServing, request: Any) -> Any:
    chat = original(serving, request)
    for message in chat.messages:
        parts = message.content if message.role == "assistant" else None
        if isinstance(parts, list) and parts and all(part.type == "text" for part in parts):
            message.content = "".join(part.text for part in parts)
    return chat


def keep_budget(original: Original, request: Any, *args: Any, **kw: Any) -> Any:
    """Around `ResponsesRequest.to_sampling_params`: allows all of `max_output_tokens`.

    SGLang subtracts two, for tokens that no engine adds.
    """
    params = original(request, *args, **kw)
    if request.max_output_tokens is not None and params["max_new_tokens"] is not None:
        params["max_new_tokens"] += 2
    return params
