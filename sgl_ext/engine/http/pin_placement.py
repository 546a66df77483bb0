"""Finds where the marked blocks of a request end in its prompt, in tokens.

SGLang itself makes the prompt, with its conversion and template. So a copy of the body with markers
in it takes the same way, up to where the template is rendered (`sgl_ext.requests.breakpoints` puts
the markers in); the tokens are counted in the real prompt's ids. That happens only for blocks that
are new in their place: an agent's next turn finds its earlier ones known.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import orjson
import xxhash

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.isolation import group_of
from sgl_ext.engine.core.request_context import RequestContext, context_of, current, entered
from sgl_ext.engine.host_cache.token_array import is_array_allowed, restore_list
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.http.thinking import drops_thinking
from sgl_ext.engine.http.token_offsets import Prompt, TokenOffsets
from sgl_ext.engine.http.translation import translated_copy
from sgl_ext.engine.sglang_http_types import GenerateReqInput, ServingChat
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.requests.breakpoints import locate
from sgl_ext.requests.places import block_at, is_last, text_of
from sgl_ext.requests.protocol import Place

_logger = logging.getLogger(__name__)


def place_pins(
    original: Callable[..., Any], chat: ServingChat, request: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: finds where marked blocks end.

    It may run in a thread that has no context variables, so it enters the context again.
    """
    raw_request = args[0] if args else kw.get("raw_request")
    context = context_of(raw_request) or RequestContext(group=group_of(None, raw_request))
    with entered(context):
        context.is_array_allowed = is_array_allowed(chat, request)
        converted = original(chat, request, *args, **kw)
        context.is_array_allowed = False
        if not context.are_hints_sent and converted[0].require_reasoning:
            context.is_answer_reusable = not _drops_thinking(chat)
        if not context.are_hints_sent and context.marks.blocks:
            _place_pins(chat, context, converted[0])
    restore_list(chat, converted[0])
    return converted


def _place_pins(chat: ServingChat, context: RequestContext, converted: GenerateReqInput) -> None:
    found: list[tuple[int, float]] = []
    if isinstance(ids := converted.input_ids, (list, array)):
        try:
            found = _find_ends(chat, context, ids)
        except Exception:  # templates and tokenizers may raise anything
            _logger.exception("sgl-ext: the ends of marked blocks were not found")
    if missing := len(context.marks.blocks) - len(found):
        counter("breakpoints_not_found").labels(context.path).inc(missing)
    context.pins = (*sorted(found), *context.pins)


def render_only(
    original: Callable[..., Any], chat: ServingChat, messages: Any, **options: Any
) -> Any:
    """Around `OpenAIServingChat._render_and_encode_chat_template`: collects a copy's prompt as
    text, and does not tokenize it."""
    context = current()
    rendered = None if context is None else context.renderings
    if rendered is None:
        return original(chat, messages, **options)
    if not (chat._prompt_text_round_trip_is_lossy or chat.template_manager.python_chat_template):
        rendered.append(
            chat.tokenizer_manager.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=options.get("add_generation_prompt", True),
                tools=options["tools"],
                return_dict=False,
                **options["template_kwargs"],
            )
        )
    return [], None


def _find_ends(
    chat: ServingChat, context: RequestContext, ids: Sequence[int]
) -> list[tuple[int, float]]:
    """For each marked block whose end is found, the tokens up to there, and its TTL."""
    marks, body, prompt = context.marks.blocks, context.body, Prompt(ids)
    places = [mark.place for mark in marks]
    offsets = _offsets_of(chat)
    keys = [_key(context, place) for place in places]
    tokens = [offsets.recall(key, prompt) for key in keys]
    if tokens[-1] is None and is_last(body, places[-1]):
        tokens[-1] = offsets.by_tail(text_of(body, places[-1]) or "", prompt)
    if None in tokens:
        located = locate(context.protocol, body, places, partial(_render, chat, context.path))
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


def _remember_tail(offsets: TokenOffsets, block: str | None, tail: str) -> None:
    """Remembers what the template wrote after the last block, unless it trimmed the block."""
    if block and block == block.rstrip():
        offsets.remember_tail(tail)


def _key(context: RequestContext, place: Place) -> int:
    """A hash of a block's content, place and cache group. It is the same in the next turn, in which
    marks have moved on."""
    body, session = context.body, context.chain.session
    block = block_at(body, place)
    if isinstance(block, dict):
        block = {key: value for key, value in block.items() if key != "cache_control"}
    preceding = f"{session}" if place[0] == "messages" else body.get("system")
    return xxhash.xxh3_128_intdigest(orjson.dumps((context.group, place, block, preceding)))


def _offsets_of(chat: ServingChat) -> TokenOffsets:
    known = installed().token_offsets
    if chat not in known:
        tokenizer = chat.tokenizer_manager.tokenizer
        encode = partial(tokenizer.encode, add_special_tokens=False)
        known[chat] = TokenOffsets(encode, tokenizer.decode)
    return known[chat]


def _drops_thinking(chat: ServingChat) -> bool:
    known = installed().drops_thinking
    if chat not in known:
        known[chat] = drops_thinking(chat, _collecting)
    return known[chat]


def _render(chat: ServingChat, path: str, body: Any) -> str | None:
    """A body's prompt as text, rendered by SGLang; None if there is no text."""
    is_multimodal = chat.tokenizer_manager.model_config.is_multimodal
    with _collecting() as rendered:
        chat._process_messages(_chat_request(chat, path, body), is_multimodal)
    return rendered[-1] if rendered else None


def _chat_request(chat: ServingChat, path: str, body: Any) -> Any:
    body = translated_copy(chat, path, body)
    if path in ANTHROPIC.paths:
        request = sglang_api.AnthropicMessagesRequest(**body)
        return sglang_api.AnthropicServing(chat)._convert_to_chat_completion_request(request)
    return sglang_api.ChatCompletionRequest(**body)


@contextmanager
def _collecting() -> Iterator[list[str]]:
    """Inside the block, prompts of the current request are collected, and not tokenized."""
    context = current()
    assert context is not None
    rendered: list[str] = []
    context.renderings = rendered
    try:
        yield rendered
    finally:
        context.renderings = None
