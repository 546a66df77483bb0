"""What SGLang's front end does with all messages of a request, by their number.

For each token of a chat completion whose model can call tools, it looks through them four times;
ours finds it once. Before it renders them, it copies their dicts twice; ours are quick to copy, and
cached ones are their own copies.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from sgl_ext_cpu import front_end

from bench.lib.spread import spread
from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.host_cache.message_cache import Message, SharedMessage
from sgl_ext.engine.http.cache_hooks import count_calls, find_tools
from sgl_ext.engine.sglang_types import Original

_MESSAGES = (41, 171, 421, 3301)
_TOOLS = 20
_TIMES = 20
# The calls of `_process_tool_call_stream` and of `_tool_call_parsing_active`, which runs twice.
_LOOKS_FOR_TOOLS = 3


def per_token_ms(rounds: int) -> dict[str, Any]:
    """Milliseconds of CPU time for each token, by the number of messages and by arm."""
    front_end.load()
    module = import_module("sglang.srt.entrypoints.openai.serving_chat")
    chat = object.__new__(module.OpenAIServingChat)
    tools, calls = type(chat)._effective_tools, type(chat)._get_history_tool_calls_cnt
    once, counted = partial(find_tools, tools), partial(count_calls, calls)
    result: dict[str, Any] = {}
    for messages in _MESSAGES:
        request = _request(messages)
        seen: dict[str, list[float]] = {"stock": [], "ours": []}
        for _ in range(rounds):
            seen["stock"].append(_ms(partial(_look, tools, calls, chat, request)))
            with entered(RequestContext()):
                seen["ours"].append(_ms(partial(_look, once, counted, chat, request)))
        result[str(messages)] = {arm: spread(times, 4) for arm, times in seen.items()}
    return result


def copies_ms(rounds: int) -> dict[str, Any]:
    """Milliseconds of CPU time for both copies of a request's dicts, by the number of messages.

    cached: ours for messages of `/v1/messages` that are known.
    """
    front_end.load()
    result: dict[str, Any] = {}
    for messages in _MESSAGES:
        written = [message.model_dump() for message in _request(messages).messages]
        arms: dict[str, list[Any]] = {
            "stock": written,
            "ours": [*map(Message, written)],
            "cached": [*map(SharedMessage, written)],
        }
        seen: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, dicts in arms.items():
                seen[arm].append(2 * _ms(partial(copy.deepcopy, dicts), 1))
        result[str(messages)] = {arm: spread(times, 4) for arm, times in seen.items()}
    return result


def _look(find: Original, count: Original, *given: Any) -> None:
    for _ in range(_LOOKS_FOR_TOOLS):
        find(*given)
    count(*given)


def _ms(work: Callable[[], object], times: int = _TIMES) -> float:
    work()
    begin_s = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begin_s) * 1e3 / times


def _request(messages: int) -> Any:
    protocol = import_module("sglang.srt.entrypoints.openai.protocol")
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Please tidy up this project."}]
    while len(turns) < messages:
        name = f"call_{len(turns)}"
        function = {"name": "Tool3", "arguments": "{}"}
        call = {"id": name, "type": "function", "function": function}
        turns.append({"role": "assistant", "content": "Next.", "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": name, "content": "def f(): pass"})
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": f"Tool{number}", "parameters": schema}}
        for number in range(_TOOLS)
    ]
    return protocol.ChatCompletionRequest(model="bench", messages=turns, tools=tools)
