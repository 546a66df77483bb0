"""What SGLang's rendering of prompts does otherwise here: it leaves tools out that are shown later,
keeps the thinking in a conversation that is summed up, and renders without tokenizing copies of a
request's body, and made-up chats.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, current
from sgl_ext.engine.sglang_http_types import ServingChat
from sgl_ext.engine.sglang_types import Original
from sgl_ext.reading.compaction import appended, leaves_room
from sgl_ext.reading.segments import Chain, tools_at_head


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


def keep_prompt(original: Original, chat: ServingChat, messages: Any, **options: Any) -> Any:
    """Around `OpenAIServingChat._render_and_encode_chat_template`: a request for a summary keeps
    the thinking, and the tools, that the prompt of the turn before had.

    It is rendered as sent if it would leave too little room for the summary.
    """
    context = current()
    if context is None or context.summary is None:
        return original(chat, messages, **options)
    prompt = _with_thinking(chat, messages, options)
    if context.renderings is not None:
        if prompt is None:
            return original(chat, messages, **options)
        context.renderings.append(prompt)
        return [], None
    if prompt is None:
        ids, text = original(chat, messages, **options)
    else:
        tokenizer, text = chat.tokenizer_manager.tokenizer, None
        ids = sglang_api.parallel_prompt_encode(tokenizer, prompt, options["encode_kwargs"])
    kept = {"summary_thinking": prompt is not None, "summary_tools": context.summary.keeps_tools}
    if any(kept.values()) and not leaves_room(len(ids), chat.tokenizer_manager.max_req_input_len):
        kept = {"summary_as_sent": True}
        if context.summary.keeps_tools:
            options["tools"] = None
        context.body, context.chain, context.summary = context.summary.body, Chain(), None
        ids, text = original(chat, messages, **options)
    for what, is_counted in kept.items():
        if is_counted:
            counter("translated_parts").labels(context.path, what).inc()
    return ids, text


def _with_thinking(chat: ServingChat, messages: Any, options: dict[str, Any]) -> str | None:
    """The prompt of a request for a summary; None if it loses no thinking, or is no text."""
    last = messages[-1] if messages else {}
    text, is_text = last.get("content"), not chat._prompt_text_round_trip_is_lossy
    if last.get("role") != "user" or not isinstance(text, str) or not is_text:
        return None
    if chat.template_manager.python_chat_template is not None:
        return None

    def rendered(shown: Any, *, begins_answer: bool) -> str:
        prompt: str = chat.tokenizer_manager.tokenizer.apply_chat_template(
            shown,
            tokenize=False,
            add_generation_prompt=begins_answer,
            tools=options["tools"],
            return_dict=False,
            **options["template_kwargs"],
        )
        return prompt

    try:
        before = rendered(messages[:-1], begins_answer=False)
    except Exception:  # a template may refuse messages that end so
        return None
    return appended(before, rendered(messages, begins_answer=True), text)


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
