"""SGLang's HTTP front end with our hooks and one chat template. A script answers in place of an
engine, so nothing is generated."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from bench.lib.script import require
from bench.lib.templates.forms import Form

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}[|｜]>|<\|?\w+\|>|<\|\w+>|\[/?[A-Z_]{3,}\]|</?(?:minimax:)?\w*think>"
    r"|</?(?:minimax:)?tool_call>|</?tool_response>|\]~!?b\[?\]?|\[e~\["
)
_ENCODERS = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
_CACHE_BYTES = 1 << 26


@dataclass
class Asked:
    """A request and its answer.

    prompt, answer: their tokens. text: the prompt as text. document: the answer as JSON.
    """

    status: int
    document: dict[str, Any]
    text: str = ""
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    @property
    def error(self) -> str:
        error = self.document.get("error") or self.document
        return str(error.get("message", error) if isinstance(error, dict) else error)


class _Engine:
    """In place of SGLang's `TokenizerManager`."""

    def __init__(self, tokenizer: Any, form: Form) -> None:
        architecture = "DeepseekV3ForCausalLM" if tokenizer.chat_template is None else "Any"
        config = SimpleNamespace(model_type=form.model_type, architectures=[architecture])
        self.tokenizer, self._form = tokenizer, form
        self.processor = self.mm_processor = None
        self.served_model_name = self.model_path = "bench"
        self.server_args = SimpleNamespace()
        self.request_logger = SimpleNamespace(log_requests=True, log_requests_level=0)
        self.num_reserved_tokens, self.context_len = 0, 1 << 20
        self.model_config = SimpleNamespace(
            hf_config=config,
            is_multimodal=False,
            context_len=1 << 20,
            get_default_sampling_params=dict,
        )
        self.write: Callable[[str], str] = str
        self.asked = Asked(0, {})

    def config_value(self, name: str) -> Any:
        return {
            "tool_call_parser": self._form.tool_parser,
            "reasoning_parser": self._form.reasoning_parser,
            "grammar_backend": "xgrammar",
        }.get(name)

    async def generate_request(self, request: Any, _: Any = None) -> AsyncIterator[dict[str, Any]]:
        ids = request.input_ids
        ids = self.tokenizer.encode(request.text) if ids is None else list(ids)
        text = self.tokenizer.decode(ids)
        written = self.write(text)
        answer = self.tokenizer.encode(written, add_special_tokens=False)
        self.asked = Asked(200, {}, text, ids, answer)
        yield {
            "text": written,
            "output_ids": answer,
            "meta_info": {
                "id": "bench",
                "finish_reason": {"type": "stop", "matched": None},
                "prompt_tokens": len(ids),
                "completion_tokens": len(answer),
                "cached_tokens": 0,
                "weight_version": "bench",
            },
        }


class FrontEnd:
    """One template's. source: None for a model whose prompts are written by SGLang's encoder."""

    def __init__(self, source: str | None, form: Form, vocabulary: Any) -> None:
        # As `sglang.srt.entrypoints.http_server` does it at its start.
        sglang = "sglang.srt"
        templates = import_module(f"{sglang}.parser.template_manager").TemplateManager()
        chat = import_module(f"{sglang}.entrypoints.openai.serving_chat")
        messages = import_module(f"{sglang}.entrypoints.anthropic.serving")
        responses = import_module(f"{sglang}.entrypoints.openai.serving_responses")
        tokenizer = _tokenizer(source, form, vocabulary)
        self._engine = _Engine(tokenizer, form)
        templates.initialize_templates(self._engine, "bench")
        _install_caches(tokenizer)
        self.app = import_module(f"{sglang}.entrypoints.http_server").app
        state = self.app.state
        state.openai_serving_chat = chat.OpenAIServingChat(self._engine, templates)
        state.anthropic_serving = messages.AnthropicServing(state.openai_serving_chat)
        self.has_responses = form.model_type != "gpt_oss"  # its vocabulary is downloaded
        state.openai_serving_responses = None
        if self.has_responses:
            state.openai_serving_responses = responses.OpenAIServingResponses(
                self._engine, templates
            )
        import_module("sgl_ext.engine.http.template_facts").log_template(self.app)

    def ask(self, path: str, body: dict[str, Any], write: Callable[[str], str]) -> Asked:
        """Sends a request. write: the answer to a prompt."""
        from starlette.testclient import TestClient

        self._engine.write = write
        self._engine.asked = Asked(0, {})
        client = TestClient(self.app, raise_server_exceptions=False)
        response = client.post(path, json=body)
        asked = self._engine.asked
        asked.status, asked.document = response.status_code, response.json()
        whole = self._engine.tokenizer.encode(asked.text, add_special_tokens=False)
        require(whole == asked.prompt, "a prompt's tokens are those of its whole text", path=path)
        return asked

    def text_around(self, ids: list[int], at: int) -> str:
        """The text of some tokens before and after one."""
        return str(self._engine.tokenizer.decode(ids[max(at - 6, 0) : at + 10]))


def prepare() -> None:
    """Loads SGLang's front end and applies our hooks to it, once a process."""
    from sgl_ext.engine.hooks import HOOKS, Role, apply_hooks

    warnings.simplefilter("ignore")  # SGLang's
    import_module("sglang.srt.entrypoints.http_server")
    apply_hooks(Role.MAIN, HOOKS[Role.MAIN])
    context = import_module("sglang.srt.runtime_context").get_context()
    context.override_server_args().install()
    logging.disable(logging.CRITICAL)


def _install_caches(tokenizer: Any) -> None:
    """The extension's state of an engine of this tokenizer."""
    from sgl_ext.engine.host_cache.message_cache import MessageCache
    from sgl_ext.engine.host_cache.token_cache import make_token_cache
    from sgl_ext.engine.http.extension import HttpExtension, install
    from sgl_ext.settings.schema import EngineSettings

    extension = HttpExtension(EngineSettings())
    extension.token_cache = make_token_cache(tokenizer, _CACHE_BYTES)
    extension.message_cache = MessageCache(_CACHE_BYTES)
    install(extension)


def _tokenizer(source: str | None, form: Form, vocabulary: Any) -> Any:
    """A tokenizer in which what delimits roles and calls is one token each."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    written = form.write(form.thinks_if, "a", "b", [("c", {"d": "e"})]) if source else ""
    special = {*_SPECIAL.findall("".join([source or "", written, *form.tags]))}
    backend = Tokenizer.from_str(vocabulary.to_str())
    added = [AddedToken(text, normalized=False) for text in sorted({*special, *_ENCODERS})]
    backend.add_tokens(added)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = source
    return made
