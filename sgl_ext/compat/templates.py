"""What the chat template of this engine does, seen through SGLang's front end, and messages that
are fitted to it.

After a prompt of a template that leaves thinking out, the generated answer begins with thinking
that no later prompt has, so the answer is never read from the cache again.

    fault     messages that a chat template cannot say are lost, or end in a 400
    hooks     group "templates"
    test      tests/compat/test_templates.py, test_template_fitting.py
    upstream  no patch yet
    ends with a version that fits messages to the model's template
"""

import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sgl_ext.compat.broken_arguments import with_written_arguments
from sgl_ext.compat.template_fitting import (
    REASONING,
    Places,
    Plan,
    fitted,
    with_descriptions,
    with_sayable_roles,
)
from sgl_ext.compat.template_model import (
    INSTRUCTIONS,
    Json,
    Place,
    Render,
    TemplateModel,
    call_in,
    frame_of,
    is_found_in_text,
    observe,
)
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, current, entered
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.http.rendering import collecting
from sgl_ext.engine.sglang_http_types import ServingChat, TokenizerManager
from sgl_ext.engine.sglang_types import Original
from sgl_ext.protocols.routes import TEMPLATE

_NONE = "what writes this model's prompts takes no user's message"
_logger = logging.getLogger(__name__)


def template_of(chat: ServingChat) -> TemplateModel | None:
    """What a front end's template does; None if it has none that renders a user's message."""
    known = installed().templates
    if chat not in known:
        known[chat] = _observed(chat)
    return known[chat]


def make_plan(chat: ServingChat) -> Plan | None:
    """Makes the plan by which messages are fitted to a front end's template from now on.

    None if it has no template that is known: then messages reach it as they are.
    """
    model = template_of(chat)
    plans, places = installed().plans, installed().places
    if chat not in places and _is_no_template(chat):
        places[chat] = _places_of(chat, model)
    if model is None or chat in plans:
        return plans.get(chat)
    plan = plans[chat] = Plan(model)
    after = _observed(chat)
    if after is not None and _drops(after):
        plans[chat] = Plan(model, "thinking")
        with_thinking = _observed(chat)
        if with_thinking is not None and not _drops(with_thinking):
            plan, after = plans[chat], with_thinking
    seen = model if after is None else after
    kept = {
        "text beside calls": seen.has_text_with_calls,
        "parallel calls": seen.has_parallel_calls,
    }
    unsayable = frozenset(what for what in kept if seen.has_calls and not kept[what])
    field = plan.thinking_field
    plans[chat] = Plan(
        model,
        field,
        unsayable,
        _drops(seen),
        frame=frame_of(_thinking(chat)),
        takes_reasoning=field != REASONING or not _finds_thinking(chat, seen),
        # SGLang's own names of calls are such ones for this parser, except on /v1/responses.
        numbers_calls=chat.tool_call_parser == "kimi_k2" and seen.has_call_ids,
    )
    return plans[chat]


def drops_thinking(chat: ServingChat) -> bool:
    """Whether the template leaves thinking out both before a user's turn and in a loop of tools."""
    plan, model = make_plan(chat), template_of(chat)
    return plan.drops_thinking if plan is not None else model is not None and _drops(model)


def leave_instructions(original: Original, chat: ServingChat) -> bool:
    """In place of `OpenAIServingChat._resolve_inline_system_support`: SGLang leaves instructions
    where they are, and they are fitted to what writes the prompts."""
    return True


def fit_messages(original: Original, chat: ServingChat, messages: Any, **options: Any) -> Any:
    """Around `OpenAIServingChat._render_and_encode_chat_template`: gives the template messages of
    which it loses nothing."""
    plan, context = installed().plans.get(chat), current()
    if context is not None:
        messages = with_written_arguments(messages, context.body)
    if plan is not None:
        counts: Counter[str] = Counter()
        messages = fitted(messages, plan, counts)
        _count(counts)
        if plan.model.needs_descriptions:
            options["tools"] = with_descriptions(options.get("tools"))
    return original(chat, messages, **options)


def place_instructions(
    original: Original, chat: ServingChat, request: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._process_messages`: the same for instructions, where no template
    writes the prompts."""
    places = installed().places.get(chat)
    if places is not None and not places.have([message.role for message in request.messages]):
        counts: Counter[str] = Counter()
        given = [message.model_dump() for message in request.messages]
        known = dict(zip(map(id, given), request.messages, strict=True))
        request.messages = [
            known.get(id(message)) or _parsed(message)
            for message in with_sayable_roles(given, places, counts)
        ]
        _count(counts)
    return original(chat, request, *args, **kw)


def _parsed(message: dict[str, Any]) -> Any:
    return sglang_api.ChatCompletionRequest(model="", messages=[message]).messages[0]


def _count(counts: Counter[str]) -> None:
    context = current()
    if context is not None and context.renderings is None:
        for what, times in (+counts).items():  # without zeros
            counter("translated_parts").labels(context.path, what).inc(times)


def _is_no_template(chat: ServingChat) -> bool:
    """Whether an encoder writes the prompts, or one of the forms that SGLang has itself."""
    is_form = chat.template_manager.chat_template_name is not None
    return is_form or chat.chat_encoding_spec is not None


def _places_of(chat: ServingChat, model: TemplateModel | None) -> Places:
    """Where these write instructions. Encoders write bare text between turns, which is right only
    for models that SGLang names."""
    first = {"system": Place.IN_PLACE} if model is None else model.first
    resolve = unwrap(type(chat)._resolve_inline_system_support)
    later = Place.IN_PLACE if resolve(chat) else Place.LOST
    return Places(first, dict.fromkeys(INSTRUCTIONS, later))


def takes_thinking(original: Original, chat: ServingChat) -> bool:
    """Around `OpenAIServingChat.supports_native_reasoning_history`: thinking stays apart from the
    text for a template that does not find it in there."""
    plan = installed().plans.get(chat)
    return bool(original(chat) or (plan is not None and plan.takes_reasoning))


def _finds_thinking(chat: ServingChat, model: TemplateModel) -> bool:
    """Whether thinking in an answer's text is rendered as it is in its own field."""
    if model.loop_thinking is not Place.IN_PLACE:
        return True
    try:
        return is_found_in_text(_thinking(chat), chat.wrap_reasoning_history)
    except Exception:  # templates raise errors of all kinds, and a model may have no parser
        return True


def _drops(model: TemplateModel) -> bool:
    return model.thinking == model.loop_thinking == Place.LOST


def log_template(app: Any) -> None:
    """Writes into the log what the template does, once SGLang's front end is there."""
    chat = getattr(app.state, "openai_serving_chat", None)
    responses = getattr(app.state, "openai_serving_responses", None)
    for front_end in (chat, responses):
        if front_end is not None:
            make_plan(front_end)
    facts = {"template": _NONE} if chat is None else _facts(chat) or {"template": _NONE}
    _logger.info("chat template: %s", "; ".join(f"{name}: {fact}" for name, fact in facts.items()))


def check_template(manager: TokenizerManager, template_manager: Any) -> None:
    """Raises ValueError for a chat template that is no template: each chat would end in an error.
    Call it before the server starts, which then ends."""
    source = getattr(manager.tokenizer, "chat_template", None)
    if not isinstance(source, str) or template_manager.chat_template_name is not None:
        return
    from jinja2 import TemplateSyntaxError

    try:
        import_module("transformers.utils.chat_template_utils")._compile_jinja_template(source)
    except TemplateSyntaxError as error:
        what = f"line {error.lineno}: {error.message}"
        raise ValueError(f"the model's chat template cannot be read: {what}") from None


def template_route() -> Route:
    """`GET /sgl_ext/template`: the same as JSON."""

    async def show(request: Request) -> JSONResponse:
        chat = getattr(request.app.state, "openai_serving_chat", None)
        return JSONResponse({"template": None if chat is None else _facts(chat)})

    return Route(TEMPLATE, show, methods=["GET"])


def _facts(chat: ServingChat) -> dict[str, str] | None:
    """What the template does, for a person; None if it has none that renders a user's message."""
    model = template_of(chat)
    if model is None:
        return None
    facts = dict(model.lines())
    if model.has_calls and chat.tool_call_parser:
        facts["form of calls"] = "as generated" if _is_parsed(chat) else "not as generated"
    return facts


def _is_parsed(chat: ServingChat) -> bool:
    """Whether the model's parser finds a call in what the template writes of one."""
    kinds = sglang_api.FunctionCallParser.ToolCallParserEnum
    try:
        parser = kinds[chat.tool_call_parser]()
        return any(map(parser.has_tool_call, call_in(partial(_render, chat))))
    except Exception:  # parsers may want more than their name
        return True


def _observed(chat: ServingChat) -> TemplateModel | None:
    try:
        return observe(partial(_render, chat), _thinking(chat))
    except ValueError:
        return None


def _thinking(chat: ServingChat) -> Render:
    """Renders for a model that thinks."""
    return partial(_render, chat, thinks=True)


def _render(
    chat: ServingChat, messages: list[Json], tools: list[Json], *, thinks: bool = False
) -> str:
    request = sglang_api.ChatCompletionRequest(model="", messages=messages, tools=tools or None)
    if thinks:
        with suppress(ValueError):  # it always thinks, or never
            chat.apply_reasoning_enabled(request, True)
    with entered(RequestContext()), collecting() as rendered:
        chat._process_messages(request, False)
    return rendered[-1]
