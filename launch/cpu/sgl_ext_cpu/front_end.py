"""SGLang's front end for one tokenizer, as its HTTP server makes it, without an engine.

It parses, converts and renders requests of all protocols. `Manager` stands in for the part that
would send them to an engine.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

_PLATFORM = "sgl_ext_cpu"  # the name is in a module that SGLang must import
_ENTRY = "sglang.srt.entrypoints"
CONTEXT_TOKENS = 1 << 20


class Manager:
    """In place of SGLang's `TokenizerManager`.

    model_type: as in the configuration of the model. model: the name that requests have.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        model_type: str = "any",
        model: str = "model",
    ) -> None:
        architecture = "DeepseekV3ForCausalLM" if tokenizer.chat_template is None else "Any"
        self.tokenizer = tokenizer
        self.processor = self.mm_processor = None
        self.served_model_name = self.model_path = model
        self.server_args = SimpleNamespace()
        self.request_logger = SimpleNamespace(log_requests=True, log_requests_level=0)
        self.num_reserved_tokens, self.context_len = 0, CONTEXT_TOKENS
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(model_type=model_type, architectures=[architecture]),
            is_multimodal=False,
            context_len=CONTEXT_TOKENS,
            get_default_sampling_params=dict,
        )
        self._config = {
            "tool_call_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
        }

    def config_value(self, name: str) -> Any:
        """A setting of the engine; None if it has its default."""
        return self._config.get(name)


class FrontEnd(NamedTuple):
    """What answers each protocol. responses: None for gpt-oss, whose vocabulary is downloaded."""

    chat: Any
    messages: Any
    responses: Any


def load() -> None:
    """Imports SGLang's front end, for the CPU. Its modules warn while they are imported."""
    os.environ.setdefault("SGLANG_PLATFORM", _PLATFORM)
    with warnings.catch_warnings(action="ignore"):
        import_module(f"{_ENTRY}.http_server")


def settings() -> AbstractContextManager[Any]:
    """SGLang's settings, with those that an engine resolves at its start. A front end reads them
    when it is made and for each request."""
    context = import_module("sglang.srt.runtime_context").get_context()
    found: AbstractContextManager[Any] = context.override_server_args(grammar_backend="xgrammar")
    return found


def make(manager: Manager, changed: Callable[[type], type] = lambda kind: kind) -> FrontEnd:
    """The front end, inside of `settings`. changed: makes another class of each of SGLang's."""
    templates = import_module("sglang.srt.parser.template_manager").TemplateManager()
    templates.initialize_templates(manager, manager.model_path)
    kind = changed(import_module(f"{_ENTRY}.openai.serving_chat").OpenAIServingChat)
    chat = kind(manager, templates)
    messages = import_module(f"{_ENTRY}.anthropic.serving").AnthropicServing(chat)
    if manager.model_config.hf_config.model_type == "gpt_oss":
        return FrontEnd(chat, messages, None)
    kind = changed(import_module(f"{_ENTRY}.openai.serving_responses").OpenAIServingResponses)
    return FrontEnd(chat, messages, kind(manager, templates))


def bare_tokenizer(template: str) -> Any:
    """A tokenizer that renders a template and knows no words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made
