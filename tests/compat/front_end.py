"""SGLang's own front end with any chat template, and with our hooks around it."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib import import_module
from typing import Any

from sgl_ext_cpu import front_end

from sgl_ext.compat.templates import fit_messages, leave_instructions, make_plan, takes_thinking
from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.host_cache.chat_templates import compile_template
from sgl_ext.engine.http.rendering import collecting, render_only
from sgl_ext.engine.http.translation import convert_messages, model_of
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.rewriting import translate

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"


def _compile_as_an_engine() -> None:
    """Templates are compiled with our hook from now on."""
    utils = import_module("transformers.utils.chat_template_utils")
    if not hasattr(utils._compile_jinja_template, "func"):
        utils._compile_jinja_template = partial(compile_template, utils._compile_jinja_template)


def _hooked(kind: Any, *, fits: bool) -> Any:
    class Serving(kind):  # type: ignore[misc]
        def _render_and_encode_chat_template(self, messages: Any, **options: Any) -> Any:
            return fit_messages(partial(render_only, None), self, messages, **options)

        def supports_native_reasoning_history(self) -> bool:
            return takes_thinking(kind.supports_native_reasoning_history, self)

        def _resolve_inline_system_support(self) -> bool:
            original = kind._resolve_inline_system_support
            return leave_instructions(original, self) if fits else bool(original(self))

    return Serving


class FrontEnd:
    """Renders requests to all three protocols. reasoning: SGLang's parser of thinking."""

    def __init__(self, template: str, reasoning: str = "qwen3", *, fits: bool = True) -> None:
        front_end.load()
        _compile_as_an_engine()
        manager = front_end.Manager(front_end.bare_tokenizer(template), reasoning_parser=reasoning)
        with front_end.settings():
            made = front_end.make(manager, partial(_hooked, fits=fits))
            self.chat, self._messages, self._responses = made
            for serving in (self.chat, self._responses):
                if fits:
                    make_plan(serving)

    def prompt(self, path: str, body: dict[str, Any]) -> str:
        """The prompt of a request. Raises ValueError for one that is refused."""
        entry = "sglang.srt.entrypoints"
        openai = import_module(f"{entry}.openai.protocol")
        sent, body = body, translate(of_path(path), body, model_of(self.chat)).body
        with (
            front_end.settings(),
            entered(RequestContext(path=path, body=sent)),
            collecting() as rendered,
        ):
            if path == RESPONSES:
                request = openai.ResponsesRequest(**body)
                asyncio.run(self._responses._make_request(request, None, None))
            else:
                if path == CHAT:
                    request = openai.ChatCompletionRequest(**body)
                else:
                    anthropic = import_module(f"{entry}.anthropic.protocol")
                    given = anthropic.AnthropicMessagesRequest(**body)
                    convert = type(self._messages)._convert_to_chat_completion_request
                    request = convert_messages(convert, self._messages, given)
                self.chat._process_messages(request, False)
        return rendered[-1]
