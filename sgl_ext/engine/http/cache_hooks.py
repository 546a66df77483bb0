"""Hooks that let SGLang use the host caches: of tokens, messages and schemas."""

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.host_cache.shortcuts import Message
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.sglang_types import Original


def encode_prompt(
    original: Callable[..., list[int]],
    tokenizer: Any,
    text: Any,
    encode_kwargs: dict[str, Any] | None = None,
) -> "list[int] | array[int]":
    """Around `parallel_prompt_encode` of SGLang's chat: tokenizes new pieces only."""
    cache = installed().token_cache
    if cache is None or not isinstance(text, str) or not cache.serves(tokenizer, encode_kwargs):
        return original(tokenizer, text, encode_kwargs)
    context = current()
    tokens = cache.encode(text, None if context is None else context.group)
    is_array_allowed = context is not None and context.is_array_allowed
    return tokens if is_array_allowed else tokens.tolist()


def dump_message(original: Original, message: Any, **options: Any) -> Message:
    """Around `model_dump` of the messages of chat completions."""
    cache = None if options else installed().message_cache
    known = None if cache is None else cache.dict_of(message)
    return Message(original(message, **options)) if known is None else known


def check_schema(original: Original, validator: Any, schema: Any, **options: Any) -> None:
    """Around `Draft202012Validator.check_schema`: raises SchemaError as it does."""
    if options:
        original(validator, schema, **options)
    else:
        installed().schemas.check(schema, partial(original, validator))
