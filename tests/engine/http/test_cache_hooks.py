"""What SGLang finds in the messages of a request is found once, and again if they change;
and dicts of messages are copied only where an encoder may change them."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node

from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.http.cache_hooks import count_calls, find_tools
from tests.waiting import HANG_S

CALL = {"id": "c", "type": "function", "function": {"name": "T", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "T", "parameters": {"type": "object"}}}


class Chat:
    """A front end; encoder: its own way to write prompts."""

    def __init__(self, **encoder: Any) -> None:
        vars(self).update(encoder)


class Looking:
    """SGLang's two methods, which count how often they look through the messages."""

    def __init__(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
            module = import_module("sglang.srt.entrypoints.openai.serving_chat")
        self._chat = object.__new__(module.OpenAIServingChat)
        self.times = 0

    def tools(self, chat: Any, request: Any) -> Any:
        self.times += 1
        return self._chat._effective_tools(request)

    def calls(self, chat: Any, request: Any) -> Any:
        self.times += 1
        return self._chat._get_history_tool_calls_cnt(request)


def request_of(*messages: dict[str, Any]) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=[*messages], tools=[TOOL])


@pytest.fixture
def looking() -> Looking:
    return Looking()


SAID: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "done"},
]


def test_the_messages_are_looked_through_once_for_all_tokens(looking: Looking) -> None:
    request, chat = request_of(*SAID), Chat()
    with entered(RequestContext()):
        for _ in range(50):
            found = find_tools(looking.tools, chat, request)
            assert [tool.function.name for tool in found] == ["T"]
            found.clear()  # a caller may change its list
            assert count_calls(looking.calls, chat, request) == 2
    assert looking.times == 2


def test_other_messages_and_other_tools_are_looked_through_again(looking: Looking) -> None:
    request, chat = request_of(*SAID), Chat()
    with entered(RequestContext()):
        assert len(find_tools(looking.tools, chat, request)) == 1
        request.tools = None
        assert find_tools(looking.tools, chat, request) == []
        request.messages.append(request_of(SAID[1]).messages[0])
        assert count_calls(looking.calls, chat, request) == 4
        assert count_calls(looking.calls, chat, request_of(SAID[0])) == 0


def test_outside_of_requests_nothing_is_kept(looking: Looking) -> None:
    request = request_of(*SAID)
    for times in (1, 2):
        assert len(find_tools(looking.tools, Chat(), request)) == 1
        assert looking.times == times


def test_a_response_has_the_prompt_of_the_chat_completion(node: Node) -> None:
    """It is cached by the other, and so equal to it."""
    served = requests.get(f"{node.url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    base = {"model": served, "temperature": 0, "stream": False}
    texts = [f"Look at file {number}. " * 12 for number in range(9)]
    turns = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = node.post(
        "/v1/chat/completions", {**base, **off, "max_tokens": 1, "messages": turns}
    ).json()["usage"]
    answer = node.post(
        "/v1/responses", {**base, **off, "max_output_tokens": 4, "store": False, "input": turns}
    )
    assert answer.status_code == 200, answer.text
    response = answer.json()["usage"]
    assert response["input_tokens"] == chat["prompt_tokens"]
    assert response["input_tokens_details"]["cached_tokens"] >= chat["prompt_tokens"] - 1
