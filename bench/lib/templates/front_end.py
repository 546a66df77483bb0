"""SGLang's HTTP front end with our hooks and one chat template. A script answers in place of an
engine, so nothing is generated."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import import_module
from typing import Any

from sgl_ext_cpu import front_end

from bench.lib.script import require
from bench.lib.templates.forms import Form

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}[|｜]>|<\|?\w+\|>|<\|\w+>|\[/?[A-Z_]{3,}\]|</?(?:minimax:)?\w*think>"
    r"|</?(?:minimax:)?tool_call>|</?tool_response>|\]~!?b\[?\]?|\[e~\["
)
_ENCODERS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "｜DSML｜",
)
_CACHE_BYTES = 1 << 26
_STEP_TOKENS = 3

Joined = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Makes one answer of the events of a stream."""


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


class _Engine(front_end.Manager):
    """In place of an engine: a script writes the answers."""

    def __init__(self, tokenizer: Any, form: Form) -> None:
        super().__init__(
            tokenizer, form.tool_parser, form.reasoning_parser, form.model_type, "bench"
        )
        self.write: Callable[[str], str] = str
        self.asked = Asked(0, {})

    def create_abort_task(self, _: Any) -> None:
        """Nothing runs that could be aborted."""

    async def generate_request(self, request: Any, _: Any = None) -> AsyncIterator[dict[str, Any]]:
        ids = request.input_ids
        ids = self.tokenizer.encode(request.text) if ids is None else list(ids)
        text = self.tokenizer.decode(ids)
        written = self.write(text)
        answer = self.tokenizer.encode(written, add_special_tokens=False)
        self.asked = Asked(200, {}, text, ids, answer)
        steps = range(_STEP_TOKENS, len(answer), _STEP_TOKENS) if request.stream else ()
        for tokens in (*steps, len(answer)):
            is_last = tokens == len(answer)
            yield {
                "text": written if is_last else self.tokenizer.decode(answer[:tokens]),
                "output_ids": answer[:tokens],
                "meta_info": {
                    "id": "bench",
                    "finish_reason": {"type": "stop", "matched": None} if is_last else None,
                    "prompt_tokens": len(ids),
                    "completion_tokens": tokens,
                    "cached_tokens": 0,
                    "weight_version": "bench",
                },
            }


class FrontEnd:
    """One template's. source: None for a model whose prompts are written by SGLang's encoder."""

    def __init__(self, source: str | None, form: Form, vocabulary: Any) -> None:
        tokenizer = _tokenizer(source, form, vocabulary)
        self._engine = _Engine(tokenizer, form)
        _install_caches(tokenizer)
        made = front_end.make(self._engine)
        self.app = import_module("sglang.srt.entrypoints.http_server").app
        state = self.app.state
        state.openai_serving_chat, state.anthropic_serving = made.chat, made.messages
        state.openai_serving_responses = made.responses
        self.has_responses = made.responses is not None
        import_module("sgl_ext.compat.templates").log_template(self.app)

    def ask(
        self,
        path: str,
        body: dict[str, Any],
        write: Callable[[str], str],
        joined: Joined | None = None,
    ) -> Asked:
        """Sends a request. write: the answer to a prompt. joined: makes a streamed answer whole."""
        from starlette.testclient import TestClient

        self._engine.write = write
        self._engine.asked = Asked(0, {})
        client = TestClient(self.app, raise_server_exceptions=False)
        response = client.post(path, json=body | ({"stream": True} if joined else {}))
        asked = self._engine.asked
        asked.status = response.status_code
        if joined is not None and response.status_code == HTTPStatus.OK:
            asked.document = joined(_events(response.text))
        else:
            asked.document = response.json()
        whole = self._engine.tokenizer.encode(asked.text, add_special_tokens=False)
        require(whole == asked.prompt, "a prompt's tokens are those of its whole text", path=path)
        return asked

    def text_around(self, ids: list[int], at: int) -> str:
        """The text of some tokens before and after one."""
        return str(self._engine.tokenizer.decode(ids[max(at - 6, 0) : at + 10]))


def prepare() -> None:
    """Loads SGLang's front end and applies our hooks to it, once a process."""
    from sgl_ext.engine.hooks import Role, apply_hooks, used_seams

    warnings.simplefilter("ignore")  # SGLang's
    front_end.load()
    apply_hooks(Role.MAIN, used_seams(Role.MAIN, shares_prefixes=False))
    front_end.settings().__enter__()
    logging.disable(logging.CRITICAL)


def _events(text: str) -> list[dict[str, Any]]:
    """The documents of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


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
