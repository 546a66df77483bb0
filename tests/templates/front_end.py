"""SGLang's own front end with any chat template, and with our hooks around it."""

from __future__ import annotations

import asyncio
import warnings
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.http.rendering import collecting, fit_messages, render_only
from sgl_ext.engine.http.template_facts import leave_instructions, make_plan, takes_thinking
from sgl_ext.engine.http.translation import convert_messages, model_of
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.rewriting import translate

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"


@cache
def _sglang() -> Any:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        entrypoints = "sglang.srt.entrypoints"
        return SimpleNamespace(
            chat=import_module(f"{entrypoints}.openai.serving_chat"),
            responses=import_module(f"{entrypoints}.openai.serving_responses"),
            openai=import_module(f"{entrypoints}.openai.protocol"),
            messages=import_module(f"{entrypoints}.anthropic.serving"),
            anthropic=import_module(f"{entrypoints}.anthropic.protocol"),
            templates=import_module("sglang.srt.parser.jinja_template_utils"),
            detection=import_module("sglang.srt.parser.template_detection"),
        )


def _tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


class FrontEnd:
    """Renders requests to all three protocols. reasoning: SGLang's parser of thinking."""

    def __init__(self, template: str, reasoning: str = "qwen3", *, fits: bool = True) -> None:
        self._sglang = sglang = _sglang()
        original = sglang.responses.OpenAIServingResponses

        class Serving(original):  # type: ignore[misc, valid-type]
            def _render_and_encode_chat_template(self, messages: Any, **options: Any) -> Any:
                return fit_messages(partial(render_only, None), self, messages, **options)

            def supports_native_reasoning_history(self) -> bool:
                return takes_thinking(original.supports_native_reasoning_history, self)

        chat = self.chat = Serving.__new__(Serving)
        tokenizer = _tokenizer(template)
        config = SimpleNamespace(is_multimodal=False, hf_config=SimpleNamespace(model_type="any"))
        chat.tokenizer_manager = SimpleNamespace(model_config=config, tokenizer=tokenizer)
        form = sglang.templates.detect_jinja_template_content_format(template)
        chat.template_manager = SimpleNamespace(
            jinja_template_content_format=form,
            jinja_template_may_reorder_tool_results=False,
            reasoning_config=None,
            python_chat_template=None,
            chat_template_name=None,
        )
        parser = import_module("sglang.srt.parser.reasoning_parser").ReasoningParser
        chat._reasoning_detector = parser(reasoning, stream_reasoning=True).detector
        facts: dict[str, Any] = {
            "reasoning_parser": reasoning,
            "tool_call_parser": None,
            "default_chat_template_kwargs": {},
            "is_gpt_oss": False,
            "is_gemma4": False,
            "is_minimax_m3": False,
            "chat_encoding_spec": None,
            "_encoding_adapter": None,
            "_tokenizer_auto_adds_specials": False,
            "_prompt_text_round_trip_is_lossy": False,
            "use_harmony": False,
            "_translates_tools": False,
            "tool_server": None,
            "msg_store": {},
        }
        for name, value in facts.items():
            setattr(chat, name, value)
        chat._template_reads_reasoning_content = chat._chat_template_reads_reasoning_content()
        chat.supports_inline_system = original._resolve_inline_system_support(chat)
        if fits:
            resolve = original._resolve_inline_system_support
            chat.supports_inline_system = leave_instructions(resolve, chat)
            make_plan(chat)
        self._messages = sglang.messages.AnthropicServing(chat)

    def prompt(self, path: str, body: dict[str, Any]) -> str:
        """The prompt of a request. Raises ValueError for one that is refused."""
        body = translate(of_path(path), body, model_of(self.chat)).body
        with entered(RequestContext(path=path)), collecting() as rendered:
            if path == RESPONSES:
                request = self._sglang.openai.ResponsesRequest(**body)
                asyncio.run(self.chat._make_request(request, None, None))
            else:
                if path == CHAT:
                    request = self._sglang.openai.ChatCompletionRequest(**body)
                else:
                    given = self._sglang.anthropic.AnthropicMessagesRequest(**body)
                    convert = type(self._messages)._convert_to_chat_completion_request
                    request = convert_messages(convert, self._messages, given)
                self.chat._process_messages(request, False)
        return rendered[-1]
