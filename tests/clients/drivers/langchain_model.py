"""LangChain's models: `chat`, `responses` and `messages`."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from loop import FUNCTIONS, KEY, MODEL, SYSTEM, TOKENS, URL, VARIANT, sessions


def model() -> Any:
    if VARIANT == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=TOKENS)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=KEY,
        stream_usage=True,
        use_responses_api=VARIANT == "responses",
    )


def ask(prompt: str, is_streamed: bool) -> str:
    bound = model().bind_tools([tool(function) for function in FUNCTIONS.values()])
    said: list[Any] = [SystemMessage(SYSTEM), HumanMessage(prompt)]
    while True:
        if is_streamed:
            answer = None
            for piece in bound.stream(said):
                answer = piece if answer is None else answer + piece
            assert answer is not None
        else:
            answer = bound.invoke(said)
        assert answer.usage_metadata["input_tokens"] > 100, answer.usage_metadata
        said.append(answer)
        if not answer.tool_calls:
            return answer.text if isinstance(answer.text, str) else answer.text()
        for call in answer.tool_calls:
            result = FUNCTIONS[call["name"]](**call["args"])
            said.append(ToolMessage(result, tool_call_id=call["id"]))


sessions(ask)
