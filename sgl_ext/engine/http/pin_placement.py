"""Where the blocks that a request marks end in its prompt, in tokens.

The prompt is SGLang's own work, conversion, template and all. So a copy of the body with
markers in it takes the same way (`sgl_ext.requests.breakpoints` says how it is marked), up
to where the template is rendered; the tokens are counted in the real prompt's ids. That is
done for blocks that are new in their place: an agent's next turn finds all of its own known.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import orjson
import xxhash

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.isolation import group_of
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.host_cache.token_array import array_allowed, restore_list
from sgl_ext.engine.host_cache.token_cache import in_group
from sgl_ext.engine.http.thinking import drops_thinking
from sgl_ext.engine.http.token_offsets import Offsets, Prompt
from sgl_ext.engine.http.translation import translated_copy
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.breakpoints import locate
from sgl_ext.requests.places import block_at, is_last, text_of
from sgl_ext.requests.protocol import Place

_logger = logging.getLogger(__name__)
_rendered: ContextVar[list[str] | None] = ContextVar("sgl_ext_rendered", default=None)
_offsets: WeakKeyDictionary[Any, Offsets] = WeakKeyDictionary()


def place_pins(original: Callable[..., Any], chat: Any, request: Any, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: finds where marked blocks end."""
    raw_request = args[0] if args else kw.get("raw_request")
    context = None if raw_request is None else getattr(raw_request.state, "context", None)
    with in_group(group_of(context, raw_request)), array_allowed(chat, request):
        converted = original(chat, request, *args, **kw)
    if context is not None and not context.are_hints_sent and converted[0].require_reasoning:
        context.is_answer_reusable = not drops_thinking(chat, _rendering)
    if context is not None and context.marks.blocks and not context.are_hints_sent:
        found: list[tuple[int, float]] = []
        if isinstance(ids := converted[0].input_ids, (list, array)):
            try:
                found = _found(chat, context, ids)
            except Exception:  # of templates and tokenizers, which we do not know
                _logger.exception("sgl-ext: marked blocks could not be found")
        missing = len(context.marks.blocks) - len(found)
        if missing:
            counter("breakpoints_not_found").labels(context.path).inc(missing)
        context.pins = (*sorted(found), *context.pins)
    restore_list(chat, converted[0])
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


def _found(chat: Any, context: RequestContext, ids: Sequence[int]) -> list[tuple[int, float]]:
    """The tokens up to the end of each marked block that could be found, and its TTL."""
    marks, body, prompt = context.marks.blocks, context.body, Prompt(ids)
    places = [mark.place for mark in marks]
    offsets = _offsets_of(chat)
    keys = [_name(context, place) for place in places]
    tokens = [offsets.recall(key, prompt) for key in keys]
    if tokens[-1] is None and is_last(body, places[-1]):
        tokens[-1] = offsets.by_tail(text_of(body, places[-1]) or "", prompt)
    if None in tokens:
        located = locate(of_path(context.path), body, places, partial(_render, chat, context.path))
        ends = sorted({end for end in located.ends if end is not None})
        counted = dict(zip(ends, offsets.count(located.text, ends, prompt), strict=True))
        tokens = [counted.get(end) if end is not None else None for end in located.ends]
        if located.ends[-1] is not None and is_last(body, places[-1]):
            _remember_tail(offsets, text_of(body, places[-1]), located.text[located.ends[-1] :])
    found = []
    for key, end, mark in zip(keys, tokens, marks, strict=True):
        if end:
            offsets.remember(key, end, prompt)
            found.append((end, mark.ttl_s))
    return found


def _remember_tail(offsets: Offsets, block: str | None, tail: str) -> None:
    """What a template wrote behind a block, if that is all there is behind it."""
    if block and block == block.rstrip():
        offsets.remember_tail(tail)


def _name(context: RequestContext, place: Place) -> int:
    """A hash of what a block is and where, and whose: the same again in the next turn, as marks
    move on."""
    body, session = context.body, context.chain.session
    block = block_at(body, place)
    if isinstance(block, dict):
        block = {key: value for key, value in block.items() if key != "cache_control"}
    preceding = f"{session}" if place[0] == "messages" else body.get("system")
    return xxhash.xxh3_128_intdigest(orjson.dumps((context.group, place, block, preceding)))


def _offsets_of(chat: Any) -> Offsets:
    if chat not in _offsets:
        tokenizer = chat.tokenizer_manager.tokenizer
        encode = partial(tokenizer.encode, add_special_tokens=False)
        _offsets[chat] = Offsets(encode, tokenizer.decode)
    return _offsets[chat]


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
    body = translated_copy(chat, path, body)
    if path in ANTHROPIC.paths:
        request = sglang_api.AnthropicMessagesRequest(**body)
        return sglang_api.AnthropicServing(chat)._convert_to_chat_completion_request(request)
    return sglang_api.ChatCompletionRequest(**body)
