"""Finds where the marked blocks of a request end in its prompt, in tokens.

SGLang itself makes the prompt, with its conversion and template. So a copy of the body with markers
in it takes the same way, up to where the template is rendered (`sgl_ext.reading.places` puts
the markers in); the tokens are counted in the real prompt's ids. That happens only for blocks that
are new in their place: an agent's next turn finds its earlier ones known.

The usage of OpenAI's answers gets what a request's marks wrote to the cache:

    "prompt_tokens_details": {"cached_tokens": 3900}
    "prompt_tokens_details": {"cached_tokens": 3900, "cache_write_tokens": 1310}

`granted_ttl_s` follows if the request states a longer TTL than the server grants. The answers of
requests without marks pass unchanged, as do errors. Generated text cannot be mistaken for usage,
because JSON escapes the quotation marks inside it.
"""

import logging
import re
from array import array
from collections.abc import Coroutine
from functools import partial
from typing import Any

import orjson
import xxhash

from sgl_ext.compat.templates import drops_thinking
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import (
    RequestContext,
    context_of,
    current,
    entered,
)
from sgl_ext.engine.core.request_names import group_of
from sgl_ext.engine.host_cache.token_cache import is_array_allowed, is_only_sent, restore_list
from sgl_ext.engine.host_cache.token_offsets import TokenOffsets
from sgl_ext.engine.host_cache.worth import turned_off
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.http.rendering import collecting
from sgl_ext.engine.http.translation import model_of
from sgl_ext.engine.sglang_http_types import ServingChat
from sgl_ext.engine.sglang_types import Original
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.places import TURNS, Render, last_text, locate, path_of, value_at
from sgl_ext.reading.protocol import Place, Protocol
from sgl_ext.reading.rewriting import translate
from sgl_ext.reading.segments import MARKS
from sgl_ext.reading.usage import written_tokens

_PROBE = [{"role": "user", "content": "Begin with a look at main.py, please."}]
_logger = logging.getLogger(__name__)


def place_pins(original: Original, chat: ServingChat, request: Any, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: finds where marked blocks end.

    It may run in a thread that has no context variables, so it enters the context again.
    """
    raw_request = args[0] if args else kw.get("raw_request")
    context = context_of(raw_request) or RequestContext(group=group_of(None, raw_request))
    with entered(context):
        context.is_array_allowed = is_array_allowed(chat, request)
        converted = original(chat, request, *args, **kw)
        context.is_array_allowed = False
        if not context.are_hints_sent:
            if converted[0].require_reasoning:
                context.is_answer_reusable = not drops_thinking(chat)
            if context.marks.blocks:
                render = partial(_render, chat, context.protocol)
                # Media take more tokens than SGLang has written for them by now.
                ids = None if converted[0].contains_mm_input() else converted[0].input_ids
                _place_pins(chat, context, ids, render)
    restore_list(chat, converted[0])
    return converted


async def place_pins_of_response(
    original: Original, serving: ServingChat, request: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingResponses._make_request`: finds where marked blocks end."""
    context = current()
    if context is not None:
        context.is_array_allowed = is_array_allowed(serving, request) and is_only_sent(
            serving.tokenizer_manager
        )
    made = await original(serving, request, *args, **kw)
    if context is not None:
        context.is_array_allowed = False
    if context is not None and context.marks.blocks and not context.are_hints_sent:

        def render(body: Any) -> str | None:
            body = translate(context.protocol, body, model_of(serving)).body
            copy = sglang_api.ResponsesRequest(**body)
            with collecting() as rendered:
                _completed(original(serving, copy, *args, **kw))
            return rendered[-1] if rendered else None

        (prompt,) = made[2]
        _place_pins(serving, context, prompt, render)
    return made


def _completed(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine that never waits to its end, in the middle of a function."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("the conversion of a response waits")


def _place_pins(chat: ServingChat, context: RequestContext, ids: Any, render: Render) -> None:
    found: list[tuple[int, float]] = []
    if isinstance(ids, (list, array)):
        whole = ids if isinstance(ids, array) else array("q", ids)
        try:
            found = _find_ends(chat, context, whole, render)
        except Exception:  # templates and tokenizers may raise anything
            _logger.exception("sgl-ext: the ends of marked blocks were not found")
    if missing := len(context.marks.blocks) - len(found):
        counter("breakpoints_not_found").labels(context.path).inc(missing)
    context.pins = (*sorted(found), *context.pins)


def _find_ends(
    chat: ServingChat, context: RequestContext, ids: "array[int]", render: Render
) -> list[tuple[int, float]]:
    """For each marked block whose end is found, the tokens up to there, and its TTL."""
    marks, body, offsets = context.marks.blocks, context.body, _offsets_of(chat)
    if offsets is None:
        return []
    worth = offsets.worth
    begun_s, recalls, new_s = worth.now(), worth.is_on(), 0.0
    places = [mark.place for mark in marks]
    keys = [_key(context, place) for place in places]
    known = [offsets.recall(key, ids) if recalls else None for key in keys]
    tokens = known.copy()
    last = last_text(body, places[-1])
    if tokens[-1] is None and last and recalls:
        tokens[-1] = offsets.by_tail(last, ids)
    if None in tokens:
        new_s = worth.now()
        located = locate(context.protocol, body, places, render)
        ends = sorted({end for end in located.ends if end is not None})
        counted = dict(zip(ends, offsets.count(located.text, ends, ids), strict=True))
        tokens = [None if end is None else counted[end] for end in located.ends]
        # A template that trims a block hides where the text after the block begins.
        if located.ends[-1] is not None and last and last == last.rstrip():
            offsets.remember_tail(located.text[located.ends[-1] :])
        new_s = worth.now() - new_s
        worth.learn(1, new_s)
    found = []
    for key, before, end, mark in zip(keys, known, tokens, marks, strict=True):
        if end:
            if end != before:
                offsets.remember(key, end, ids)
            found.append((end, mark.ttl_s))
    if worth.note(worth.now() - begun_s - new_s, 0 if new_s else 1):
        turned_off(worth)
        offsets.clear()
    return found


def _key(context: RequestContext, place: Place) -> int:
    """A hash of a block's content, place and cache group. It is the same in the next turn, in which
    marks have moved on."""
    body, session = context.body, context.chain.session
    block = value_at(body, path_of(place))
    if isinstance(block, dict):
        block = {key: value for key, value in block.items() if key not in MARKS}
    preceding = f"{session}" if place[0] in TURNS else body.get("system")
    return xxhash.xxh3_128_intdigest(orjson.dumps((context.group, place, block, preceding)))


def log_limits(app: Any) -> None:
    """Logs and counts what does not work with the way in which this model's prompts are written."""
    chat, cache = getattr(app.state, "openai_serving_chat", None), installed().token_cache
    if chat is None or chat.tokenizer_manager.tokenizer is None:
        return
    if _offsets_of(chat) is None:
        counter("prompt_features_off").labels("pins").inc()
        _logger.warning(
            "sgl-ext: marked blocks get no pins: the tokens of this model's prompts are not those"
            " of a text"
        )
    if cache is None or cache.is_off:
        return  # which is logged
    before = cache.prompts
    if _probe(chat) is not None and cache.prompts == before and not cache.is_off:
        counter("prompt_features_off").labels("tokens").inc()
        _logger.warning(
            "sgl-ext: the token cache is not used: what writes this model's prompts tokenizes them"
        )


def _offsets_of(chat: ServingChat) -> TokenOffsets | None:
    """A front end's token offsets; None if its prompts' tokens are not those of their text."""
    known = installed().chats
    if chat not in known:
        tokenizer = chat.tokenizer_manager.tokenizer
        encode = partial(tokenizer.encode, add_special_tokens=False)
        probed = _probe(chat)
        is_text = probed is None or encode(probed[0]) == probed[1]
        known[chat] = TokenOffsets(encode, tokenizer.decode) if is_text else None
    return known[chat]


def _probe(chat: ServingChat) -> tuple[str, list[int]] | None:
    """The text of a prompt, "" if it has none, and its tokens; None if the template refuses it."""
    try:
        with entered(RequestContext()):
            request = sglang_api.ChatCompletionRequest(model="", messages=_PROBE)
            ids = list(chat._process_messages(request, False).prompt_ids)
            with collecting() as rendered:
                chat._process_messages(request, False)
    except Exception:  # templates and tokenizers may raise anything
        return None
    return (rendered[-1] if rendered else ""), ids


def _render(chat: ServingChat, protocol: Protocol, body: Any) -> str | None:
    """A body's prompt as text, rendered by SGLang; None if there is no text."""
    body = translate(protocol, body, model_of(chat)).body
    if protocol is ANTHROPIC:
        serving, request = sglang_api.AnthropicServing(chat), sglang_api.AnthropicMessagesRequest
        chat_request = serving._convert_to_chat_completion_request(request(**body))
    else:
        chat_request = sglang_api.ChatCompletionRequest(**body)
    with collecting() as rendered:
        chat._process_messages(chat_request, chat.tokenizer_manager.model_config.is_multimodal)
    return rendered[-1] if rendered else None


USAGE_PATHS = frozenset((*CHAT.paths, *RESPONSES.paths))
_DETAILS = re.compile(
    rb'("(?:prompt|input)_tokens":\s*(\d+).{0,200}?'
    rb'"(?:prompt|input)_tokens_details":\s*\{"cached_tokens":\s*(\d+))'
    rb'(?:,\s*"cache_write_tokens":\s*\d+)?'
)


class WrittenUsage:
    """The usage of one answer, with what the marks of its request wrote."""

    changes_whole = True

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    @classmethod
    def of(cls, context: RequestContext, _: str) -> "WrittenUsage | None":
        """The usage in the answer of a request; None if the request has no marks."""
        return cls(context) if context.pins or context.marks.clamped_s else None

    def event(self, data: bytes) -> bytes:
        return completed(data, self._context)

    whole = event


def completed(data: bytes, context: RequestContext) -> bytes:
    """An answer, or an event of one, with what was written in its usage, if it has any."""
    if b'_tokens_details":' not in data:
        return data

    def add(usage: re.Match[bytes]) -> bytes:
        prompt, cached = int(usage[2]), int(usage[3])
        pins = [prompt if tokens < 0 else tokens for tokens, _ in context.pins]
        added = b'%b,"cache_write_tokens":%d' % (usage[1], written_tokens(pins, prompt, cached))
        if granted_s := context.marks.clamped_s:
            added += b',"granted_ttl_s":%g' % granted_s
        return added

    return _DETAILS.sub(add, data)
