"""What the chat template of this engine does, seen through SGLang's own front end.

After a prompt of a template that leaves thinking out, the generated answer begins with thinking
that no later prompt has, so the answer is never read from the cache again.
"""

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.http.rendering import collecting
from sgl_ext.engine.sglang_http_types import ServingChat
from sgl_ext.protocols.routes import TEMPLATE
from sgl_ext.templates.model import Place, TemplateModel
from sgl_ext.templates.observation import Json, observe

_NONE = "this model's prompts are written by an encoder, not by a chat template"
_logger = logging.getLogger(__name__)


def template_of(chat: ServingChat) -> TemplateModel | None:
    """What a front end's template does; None if it has none that renders a user's message."""
    known = installed().templates
    if chat not in known:
        known[chat] = _observed(chat)
    return known[chat]


def drops_thinking(chat: ServingChat) -> bool:
    """Whether the template leaves thinking out both before a user's turn and in a loop of tools."""
    model = template_of(chat)
    return model is not None and model.thinking == model.loop_thinking == Place.LOST


def log_template(app: Any) -> None:
    """Writes into the log what the template does, once SGLang's front end is there."""
    chat = getattr(app.state, "openai_serving_chat", None)
    model = None if chat is None else template_of(chat)
    facts = {"template": _NONE} if model is None else dict(model.lines())
    _logger.info("chat template: %s", "; ".join(f"{name}: {fact}" for name, fact in facts.items()))


def template_route() -> Route:
    """`GET /sgl_ext/template`: the same as JSON."""

    async def show(request: Request) -> JSONResponse:
        chat = getattr(request.app.state, "openai_serving_chat", None)
        model = None if chat is None else template_of(chat)
        return JSONResponse({"template": None if model is None else dict(model.lines())})

    return Route(TEMPLATE, show, methods=["GET"])


def _observed(chat: ServingChat) -> TemplateModel | None:
    def render(messages: list[Json], tools: list[Json]) -> str:
        request = sglang_api.ChatCompletionRequest(model="", messages=messages, tools=tools or None)
        with entered(RequestContext()), collecting() as rendered:
            chat._process_messages(request, False)
        return rendered[-1]

    try:
        return observe(render)
    except ValueError:
        return None
