"""LiteLLM by a model's prefix: `openai`, `custom_openai`, `hosted_vllm`, `anthropic`."""

from __future__ import annotations

import json
from typing import Any

import litellm
from loop import FUNCTIONS, KEY, MODEL, SCHEMAS, SYSTEM, TOKENS, URL, VARIANT, sessions


def ask(prompt: str, is_streamed: bool) -> str:
    said: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": prompt},
    ]
    functions = [{"name": n, "description": n, "parameters": s} for n, s in SCHEMAS.items()]
    request: dict[str, Any] = {
        "model": f"{VARIANT}/{MODEL}",
        "api_base": URL if VARIANT == "anthropic" else f"{URL}/v1",
        "api_key": KEY,
        "max_tokens": TOKENS,
        "messages": said,
        "tools": [{"type": "function", "function": function} for function in functions],
        "num_retries": 0,
    }
    while True:
        if is_streamed:
            usage = {"include_usage": True}
            pieces = list(litellm.completion(**request, stream=True, stream_options=usage))
            answer = litellm.stream_chunk_builder(pieces, messages=said)
        else:
            answer = litellm.completion(**request)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        said.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            said.append({"role": "tool", "tool_call_id": call.id, "content": result})


sessions(ask)
