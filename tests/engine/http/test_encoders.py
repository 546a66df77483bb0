"""Prompts that SGLang writes with an encoder and not with a Jinja template: pins, tokens, facts.

SGLang's own conversion with the tiny model's tokenizer, which has the encoders' special tokens too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from sgl_ext.compat.template_model import Place
from sgl_ext.compat.templates import make_plan, template_of
from sgl_ext.engine.core.request_context import RequestContext, entered, put_on
from sgl_ext.engine.hooks import SEAMS, Role, with_parts
from sgl_ext.engine.host_cache.token_cache import make_token_cache
from sgl_ext.engine.http import pin_placement
from sgl_ext.engine.http.cache_hooks import use_pieces
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.http.pin_placement import log_limits, place_pins
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from tests.sglang_versions import needs_group

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"


def special(name: str) -> str:
    """A special token as DeepSeek's models spell them."""
    return f"<\uff5c{name}\uff5c>"


BEGIN, END = special("begin\u2581of\u2581sentence"), special("end\u2581of\u2581sentence")
ASK, ANSWER = special("User"), special("Assistant")
SPECIAL = (
    *(BEGIN, END, ASK, ANSWER, special("System"), special("latest_reminder"), special("image")),
    *("\uff5cDSML\uff5c", "<|system|>", "<|user|>", "<|assistant|>"),
)
HOOKED = (
    *("_encode_messages", "_render_and_encode_chat_template", "parallel_prompt_encode"),
    *("encode_prompt_segments", "Chat._apply_jinja_template"),
    *("PreTrainedTokenizerBase.encode", "Chat._process_messages"),
)
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SPECS = ("dsv32", "dsv4", "dsv41", "kimi_k3", "glm", "lossy")
ENCODED_IN_PIECES = SPECS[:3] + SPECS[4:5]


pytestmark = needs_group("encoders")


@pytest.fixture(scope="module", autouse=True)
def hooked() -> Iterator[None]:
    """SGLang with the hooks that prompts pass."""
    with warnings.catch_warnings(action="ignore"), pytest.MonkeyPatch.context() as patch:
        import_module("sglang.srt.entrypoints.openai.serving_chat")
        import_module("sglang.srt.parser.deepseek_recipe_renderer")
        for symbol, seam in SEAMS[Role.MAIN].items():
            for method, parts in {"": seam.parts, **seam.methods}.items():
                path = f"{symbol}.{method}" if method else symbol
                if parts and path.endswith(HOOKED):
                    owner, name = path.rsplit(".", 1)
                    patch.setattr(resolve_name(owner), name, with_parts(resolve_name(path), parts))
        yield


class TokensOnly:
    """A tokenizer that writes prompts itself, and takes the text of messages as plain text."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(self._tokenizer.encode(text, **options))

    def apply_chat_template(self, messages: Any, tools: Any = None, **_: Any) -> list[int]:
        ids = self.encode(f"{BEGIN}{[tool['function']['name'] for tool in tools or ()]}")
        for message in messages:
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            ids += self.encode(f"{ASK}{message['role']}")
            ids += [number for text in texts for number in self.encode(text)]
            ids += self.encode(END)
        return ids + self.encode(ANSWER)


class Lossy(TokensOnly):
    """A tokenizer whose control tokens have no text that makes them again."""

    def decode(self, ids: Any, **_: Any) -> str:
        return str(self._tokenizer.decode(ids)).replace(ASK, "[USER]")


class FrontEnd:
    """SGLang's front end for one way to write prompts."""

    def __init__(self, model: Path, spec: str) -> None:
        openai = import_module("sglang.srt.entrypoints.openai.serving_chat")
        glm = import_module("sglang.srt.parser.python_chat_template")
        self.tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model)
        self.tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
        for kind, name in ((TokensOnly, "kimi_k3"), (Lossy, "lossy")):
            self.tokenizer = kind(self.tokenizer) if spec == name else self.tokenizer
        config = SimpleNamespace(is_multimodal=False, hf_config=SimpleNamespace(architectures=[""]))
        template = glm.GLM53 if spec == "glm" else None
        if template is not None:
            glm.install_python_chat_template(self.tokenizer, template)
        self.chat = openai.OpenAIServingChat.__new__(openai.OpenAIServingChat)
        off = SimpleNamespace(log_requests=False, exporter_enabled=lambda: False)
        facts: dict[str, Any] = {
            "tokenizer_manager": SimpleNamespace(
                tokenizer=self.tokenizer,
                model_config=config,
                mm_processor=None,
                request_logger=off,
                dump_requests_folder="",
                crash_dump_folder=None,
                request_metrics_exporter_manager=off,
            ),
            "template_manager": SimpleNamespace(
                chat_template_name=None,
                jinja_template_content_format="openai" if spec == "kimi_k3" else "string",
                jinja_template_may_reorder_tool_results=False,
                reasoning_config=None,
                python_chat_template=template,
            ),
            "tool_call_parser": None,
            "reasoning_parser": None,
            "chat_encoding_spec": None if spec in ("glm", "lossy") else spec,
            "_encoding_adapter": None,
            "_reasoning_detector": None,
            "default_chat_template_kwargs": None,
            "supports_inline_system": True,
            "is_minimax_m3": False,
            "is_gpt_oss": False,
            "is_gemma4": False,
            "_tokenizer_auto_adds_specials": False,
            "_prompt_text_round_trip_is_lossy": spec == "lossy",
            "_thinking_requested": lambda request: spec.startswith("dsv4"),
            "_takes_turn_grammar": lambda request, **_: False,
            "supports_native_reasoning_history": lambda: True,
        }
        for name, value in facts.items():
            setattr(self.chat, name, value)
        if spec in ("dsv4", "dsv41"):
            recipes = import_module("sglang.srt.entrypoints.openai.serving_deepseek_recipe")
            self.chat._encoding_adapter = recipes.DeepSeekRecipeChatEncodingAdapter(
                chat_encoding_spec=spec,
                tokenizer=self.tokenizer,
                reasoning_parser=None,
                tool_call_parser=None,
                chat_hooks=None,
                default_chat_template_kwargs=None,
            )
            use_pieces(self.chat._encoding_adapter)
        self.has_media = False
        self._protocol = import_module("sglang.srt.entrypoints.openai.protocol")

    def ids(self, body: dict[str, Any]) -> list[int]:
        request = self._protocol.ChatCompletionRequest(**body)
        with entered(RequestContext()):
            return list(self.chat._process_messages(request, False).prompt_ids)

    def place(self, body: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and how many of them each pin has."""
        marks = read_marks(of_path(CHAT), body, TtlLimits(300.0, 3600.0))
        context = RequestContext(CHAT, body, marks=marks)
        raw = SimpleNamespace(state=SimpleNamespace())
        put_on(raw, context)
        request = self._protocol.ChatCompletionRequest(**body)
        converted = place_pins(self._convert, self.chat, request, raw)[0]
        return list(converted.input_ids), [tokens for tokens, _ in context.pins]

    def _convert(self, chat: Any, request: Any, _: Any) -> Any:
        ids = chat._process_messages(request, False).prompt_ids
        return [
            SimpleNamespace(
                input_ids=ids,
                sampling_params={},
                require_reasoning=False,
                contains_mm_input=lambda: self.has_media,
            )
        ]


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_front_end_of = cache(FrontEnd)


@pytest.fixture
def front_end(spec: str, tiny_model: Path, extension: HttpExtension) -> FrontEnd:
    made = _front_end_of(tiny_model, spec)
    extension.token_cache = make_token_cache(made.tokenizer, 1 << 20)
    return made


def said(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, **fields}]}


def body(turns: int = 1) -> dict[str, Any]:
    messages = [said("system", "You help with the code. " * 9, **MARK)]
    for turn in range(turns):
        is_last = turn == turns - 1
        marks = MARK if is_last else {}
        messages.append(said("user", f"Please look at the file main.py, line {turn}.", **marks))
        messages.append(said("assistant", f"It defines the function run_{turn}.", **marks))
    messages.append(said("user", "Then rename it, and run all of the tests.", **MARK))
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    return {
        "model": "m",
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
    }


def texts_of(asked: dict[str, Any]) -> list[str]:
    return [message["content"][0]["text"].strip() for message in asked["messages"]]


def test_pins_end_where_the_marked_texts_do(front_end: FrontEnd, spec: str) -> None:
    asked = body()
    ids, pins = front_end.place(asked)
    if spec == "lossy":
        assert pins == []
        return
    prompts = [front_end.tokenizer.decode(ids[:end]).rstrip() for end in pins]
    for text, prompt in zip(texts_of(asked)[1:], prompts[1:], strict=True):
        assert prompt.endswith(text)
    assert texts_of(asked)[0] in prompts[0]
    assert texts_of(asked)[1] not in prompts[0]


def test_the_ends_of_earlier_turns_are_remembered_and_nothing_is_rendered(
    front_end: FrontEnd, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = body()
    _, pins = front_end.place(asked)
    monkeypatch.setattr(pin_placement, "locate", None)
    assert front_end.place(asked)[1] == pins
    assert len(pins) == (0 if spec == "lossy" else 4)


def test_tokens_are_those_of_the_whole_prompt_and_only_new_ones_are_made(
    front_end: FrontEnd, spec: str, extension: HttpExtension
) -> None:
    tokens = extension.token_cache
    front_end.ids(body(8))  # encoders check their first prompt
    before = 0 if tokens is None else tokens.new_tokens
    spelled = body(9)
    spelled["messages"][-1] = said("user", f"What does {ASK} mean?{END}")
    asked = [body(9), body(9), spelled, {**body(9), "continue_final_message": True}]
    made = [front_end.ids(each) for each in asked]
    extension.token_cache = None
    assert made == [front_end.ids(each) for each in asked]
    if spec in ENCODED_IN_PIECES:
        assert tokens is not None
        assert not tokens.is_off
        assert tokens.prompts >= 4
        assert 0 < tokens.new_tokens - before < len(made[0]) / 3


def test_a_tokenizer_that_begins_each_text_with_a_token_keeps_it(
    tiny_model: Path, extension: HttpExtension
) -> None:
    front_end = FrontEnd(tiny_model, "dsv32")
    backend = front_end.tokenizer.backend_tokenizer
    begin = backend.token_to_id(BEGIN)
    backend.post_processor = TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    extension.token_cache = make_token_cache(front_end.tokenizer, 1 << 20)
    ids, pins = front_end.place(body())
    assert ids[:2] == [begin, begin]
    assert extension.token_cache is not None
    assert extension.token_cache.prompts > 0
    assert pins == [end + 1 for end in FrontEnd(tiny_model, "dsv32").place(body())[1]]
    extension.token_cache = None
    assert front_end.ids(body()) == ids


def test_an_encoder_whose_tokens_are_no_texts_turns_the_cache_off(
    tiny_model: Path, extension: HttpExtension
) -> None:
    front_end = FrontEnd(tiny_model, "dsv4")
    extension.token_cache = tokens = make_token_cache(front_end.tokenizer, 1 << 20)
    assert tokens is not None
    recipe = front_end.chat._encoding_adapter.deepseek_recipe
    encoding = recipe._encoding._encoding
    recipe._encoding._encoding = SimpleNamespace(
        render_conversation=encoding.render_conversation,
        encode=lambda conversation: [7, *encoding.encode(conversation)],
    )
    assert front_end.ids(body())[0] == 7
    assert tokens.is_off


def test_media_take_other_tokens_than_their_places_so_nothing_is_pinned(
    tiny_model: Path, extension: HttpExtension
) -> None:
    front_end = FrontEnd(tiny_model, "kimi_k3")
    front_end.has_media = True
    assert front_end.place(body())[1] == []


def test_instructions_between_turns_are_where_the_model_knows_them(
    front_end: FrontEnd, spec: str, extension: HttpExtension
) -> None:
    make_plan(front_end.chat)
    asked = body()
    asked["messages"][2:2] = [said("system", "Mind the time."), said("developer", "Be brief.")]
    text = front_end.tokenizer.decode(front_end.ids(asked))
    places = [text.find(words) for words in ("line 0.", "Mind the time.", "Be brief.", "run_0")]
    assert places == sorted(places)
    has_reminder = "<system-reminder>\nMind the time.\n</system-reminder>" in text
    assert has_reminder == (spec in ("dsv32", "dsv4", "dsv41"))


def test_what_the_encoder_does_is_observed(front_end: FrontEnd, spec: str) -> None:
    model = template_of(front_end.chat)
    assert model is not None
    assert model.first["system"] is Place.IN_PLACE
    if spec == "dsv32":
        assert model.thinking is Place.LOST


def test_what_does_not_work_is_logged_once_at_start(
    front_end: FrontEnd, spec: str, caplog: pytest.LogCaptureFixture, extension: HttpExtension
) -> None:
    if spec == "kimi_k3":  # a tokenizer with fast pieces that this encoder does not use
        extension.token_cache = make_token_cache(front_end.tokenizer._tokenizer, 1 << 20)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        log_limits(SimpleNamespace(state=SimpleNamespace(openai_serving_chat=front_end.chat)))
    said = [record.getMessage() for record in caplog.records]
    assert [("no pins" in text, "token cache" in text) for text in said] == {
        "lossy": [(True, False)],
        "kimi_k3": [(False, True)],
    }.get(spec, [])
