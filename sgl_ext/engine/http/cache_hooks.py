"""Hooks that let SGLang use the host caches of tokens, messages and schemas.

They also search a request's messages once, where SGLang searches them for each token."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.host_cache.message_cache import Message
from sgl_ext.engine.host_cache.token_cache import RecipeEncoding
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.sglang_http_types import ServingChat
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


def encode_segments(
    original: Callable[..., list[int]],
    tokenizer: Any,
    segments: Sequence[str],
    encode_kwargs: dict[str, Any] | None = None,
) -> "list[int] | array[int]":
    """Around `encode_prompt_segments`, for templates in Python: the same for their prompts."""

    def encode(*_: Any) -> list[int]:
        return original(tokenizer, segments, encode_kwargs)

    return encode_prompt(encode, tokenizer, "".join(segments), encode_kwargs)


def encode_text(
    original: Callable[..., list[int]], tokenizer: Any, text: Any, *args: Any, **options: Any
) -> "list[int] | array[int]":
    """Around `encode` of tokenizers: the same for a prompt that an encoder has written as text.

    Inside of `collecting`, it is collected, with what the tokenizer puts before it.
    """
    context = current()
    if context is None or not context.is_prompt_encoded or not isinstance(text, str):
        return original(tokenizer, text, *args, **options)
    context.is_prompt_encoded = False
    if context.renderings is not None:
        begin = original(tokenizer, "", *args, **options)
        context.renderings.append(f"{tokenizer.decode(begin)}{text}")
        return begin
    cache, plain = installed().token_cache, {"add_special_tokens": False}
    is_served = cache is not None and not args and not options and cache.serves(tokenizer, plain)
    before = cache.added_before() if cache is not None and is_served else None
    if before is None:
        return original(tokenizer, text, *args, **options)
    tokens = encode_prompt(lambda *_: original(tokenizer, text, **plain), tokenizer, text, plain)
    return before + tokens if isinstance(tokens, list) else array("q", before) + tokens


def use_pieces(adapter: Any, *_: Any) -> None:
    """After `OpenAIServingChat._build_chat_encoding_adapter`: the same for the prompts of
    DeepSeek V4."""
    recipe = getattr(adapter, "deepseek_recipe", None)
    if recipe is None:
        return
    recipe._encoding = RecipeEncoding(
        recipe._encoding, recipe.hf_tokenizer, lambda: installed().token_cache
    )


def dump_message(original: Original, message: Any, **options: Any) -> Message:
    """Around `model_dump` of the messages of chat completions."""
    cache = None if options else installed().message_cache
    known = None if cache is None else cache.dict_of(message)
    return Message(original(message, **options)) if known is None else known


def check_schema(original: Original, validator: Any, schema: Any, **options: Any) -> None:
    """Around `Draft202012Validator.check_schema`, by which SGLang judges each tool of a request.

    No tool is judged here: most are in no grammar, and their patterns are those of ECMA-262, not of
    Python. `answers.held_schemas` judges those that are in one.
    """
    if current() is None:
        original(validator, schema, **options)


def find_tools(original: Original, chat: ServingChat, request: Any) -> list[Any]:
    """Around `OpenAIServingChat._effective_tools`, which looks through all messages several times
    before an answer, and three times for each of its tokens."""
    return list(_found_once("tools", original, chat, request))


def count_calls(original: Original, chat: ServingChat, request: Any) -> int:
    """Around `OpenAIServingChat._get_history_tool_calls_cnt`, which does so once for each token."""
    count: int = _found_once("calls", original, chat, request)
    return count


def _found_once(name: str, original: Original, chat: ServingChat, request: Any) -> Any:
    """What `original` finds in the messages and tools of a request; found again if they change."""
    context = current()
    if context is None:
        return original(chat, request)
    messages, tools = getattr(request, "messages", None), getattr(request, "tools", None)
    size = len(messages or ())
    known = context.found_in_messages.get(name)
    if known is None or known[0] is not messages or known[1] != size or known[2] is not tools:
        known = messages, size, tools, original(chat, request)
        context.found_in_messages[name] = known
    return known[3]
