"""What SGLang's rendering of prompts does otherwise here: it leaves tools out that are shown later,
fits messages to the chat template, and renders without tokenizing copies of a request's body, and
made-up chats.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_ext.engine.core.request_context import RequestContext, current
from sgl_ext.engine.sglang_http_types import ServingChat
from sgl_ext.engine.sglang_types import Original
from sgl_ext.reading.segments import tools_at_head


def leave_deferred_out(
    original: Original, chat: ServingChat, request: Any, tools: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._apply_jinja_template`: the prompt's head shows no deferred tools.

    Messages define them, so that the head stays as it was. Few templates leave them out themselves.
    """
    declared = request.tools
    if not any(map(_is_deferred, declared or ())) or defers_tools(chat):
        return original(chat, request, tools, *args, **kw)
    request.tools = [tool for tool in declared if not _is_deferred(tool)] or None
    if tools is not None:
        tools = tools_at_head(tools) or None
    try:
        return original(chat, request, tools, *args, **kw)
    finally:
        request.tools = declared


def _is_deferred(tool: Any) -> bool:
    return bool(tool.function.defer_loading)


def defers_tools(chat: ServingChat) -> bool:
    """Whether the template leaves deferred tools out, and shows those that a result refers to."""
    template = getattr(chat.tokenizer_manager.tokenizer, "chat_template", None)
    return (
        chat.template_manager.python_chat_template is not None  # GLM's, as yet
        or chat.tool_call_parser == "muse"
        or (isinstance(template, str) and "defer_loading" in template)
    )


def render_only(original: Original, chat: ServingChat, messages: Any, **options: Any) -> Any:
    """Inside of `collecting`, collects the prompt as text, and does not tokenize it."""
    context = current()
    if context is None or context.renderings is None:
        return original(chat, messages, **options)
    if chat._prompt_text_round_trip_is_lossy:  # the text is made of the tokens, not they of it
        ids, _ = original(chat, messages, **options)
        return _collect(chat, context, ids), None
    context.renderings.append(
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


def render_tokens(original: Original, chat: ServingChat, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._encode_messages`: inside of `collecting`, collects the text of the
    tokens that an encoder writes. None: it writes none."""
    ids, context = original(chat, *args, **kw), current()
    if ids is None or context is None or context.renderings is None:
        return ids
    return _collect(chat, context, ids)


def expect_text(original: Original, chat: ServingChat, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._apply_jinja_template`, which writes the prompt of DeepSeek V3.2 as
    a text, and has the tokenizer encode that first."""
    context = current()
    if context is None or chat.chat_encoding_spec != "dsv32":
        return original(chat, *args, **kw)
    context.is_prompt_encoded = True
    try:
        return original(chat, *args, **kw)
    finally:
        context.is_prompt_encoded = False


def _collect(chat: ServingChat, context: RequestContext, ids: list[int]) -> list[int]:
    assert context.renderings is not None
    context.renderings.append(chat.tokenizer_manager.tokenizer.decode(ids))
    return []


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Inside the block, prompts of the current request are collected, and not tokenized."""
    context = current()
    assert context is not None
    rendered: list[str] = []
    context.renderings = rendered
    try:
        yield rendered
    finally:
        context.renderings = None
