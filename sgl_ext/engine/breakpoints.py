"""Where the blocks that a request marks end in its prompt, in tokens.

The prompt is SGLang's own work, conversion, template and all. So a copy of the body with
markers in it takes the same way (`sgl_ext.requests.breakpoints` says how it is marked), up
to where the template is rendered; the tokens are counted in the real prompt's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from sgl_ext.engine.counters import counter
from sgl_ext.engine.hints import Reading, current
from sgl_ext.engine.offsets import Offsets
from sgl_ext.engine.thinking import drops_thinking
from sgl_ext.requests.breakpoints import locate

_rendered: ContextVar[list[str] | None] = ContextVar("sgl_ext_rendered", default=None)
_offsets: WeakKeyDictionary[Any, Offsets] = WeakKeyDictionary()


def place_pins(original: Callable[..., Any], chat: Any, request: Any, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: finds where marked blocks end."""
    converted = original(chat, request, *args, **kw)
    reading = current()
    if reading is not None and not reading.is_sent and converted[0].require_reasoning:
        reading.is_answer_kept = not drops_thinking(chat, _rendering)
    if reading is not None and reading.marks.blocks and not reading.is_sent:
        ids = converted[0].input_ids
        found = _found(chat, reading, ids) if isinstance(ids, list) else []
        missing = len(reading.marks.blocks) - len(found)
        if missing:
            counter("breakpoints_not_found").labels(reading.path).inc(missing)
        reading.pins = (*sorted(found), *reading.pins)
    return converted


def render_only(original: Callable[..., Any], chat: Any, messages: Any, **asked: Any) -> Any:
    """Around `OpenAIServingChat._render_and_encode_chat_template`: for a copy, the text is all."""
    rendered = _rendered.get()
    if rendered is None:
        return original(chat, messages, **asked)
    if not (chat._prompt_text_round_trip_is_lossy or chat.template_manager.python_chat_template):
        rendered.append(
            chat.tokenizer_manager.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=asked.get("add_generation_prompt", True),
                tools=asked["tools"],
                return_dict=False,
                **asked["template_kwargs"],
            )
        )
    return [], None


def _found(chat: Any, reading: Reading, ids: list[int]) -> list[tuple[int, float]]:
    """The tokens up to the end of each marked block that could be found, and its TTL."""
    marks = reading.marks.blocks
    places = [mark.place for mark in marks]
    located = locate(reading.body, places, partial(_render, chat, reading.path))
    ends = sorted({end for end in located.ends if end is not None})
    offsets = _offsets.get(chat)
    if offsets is None:
        tokenizer = chat.tokenizer_manager.tokenizer
        offsets = _offsets[chat] = Offsets(partial(tokenizer.encode, add_special_tokens=False))
    tokens = dict(zip(ends, offsets.find(located.text, ends, ids), strict=True))
    return [
        (tokens[end], mark.ttl_s)
        for end, mark in zip(located.ends, marks, strict=True)
        if end is not None and tokens[end] > 0
    ]


def _render(chat: Any, path: str, body: Any) -> str | None:
    """A body's prompt as text, made as SGLang makes it; None if no text comes of it."""
    with _rendering() as rendered:
        chat._process_messages(_chat_request(chat, path, body), _is_multimodal(chat))
    return rendered[-1] if rendered else None


@contextmanager
def _rendering() -> Iterator[list[str]]:
    rendered: list[str] = []
    token = _rendered.set(rendered)
    try:
        yield rendered
    finally:
        _rendered.reset(token)


def _is_multimodal(chat: Any) -> bool:
    return bool(chat.tokenizer_manager.model_config.is_multimodal)


def _chat_request(chat: Any, path: str, body: Any) -> Any:
    if path == "/v1/messages":
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

        request = AnthropicMessagesRequest(**body)
        return AnthropicServing(chat)._convert_to_chat_completion_request(request)
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    return ChatCompletionRequest(**body)
