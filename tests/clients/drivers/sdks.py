"""Anthropic's SDK (`messages`, `tool_runner`) and OpenAI's (`chat`, `responses`)."""

from __future__ import annotations

import json
from typing import Any

from loop import FUNCTIONS, KEY, MODEL, SCHEMAS, SYSTEM, TOKENS, URL, VARIANT, sessions


def messages(prompt: str, is_streamed: bool) -> str:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    said: list[Any] = [{"role": "user", "content": prompt}]
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": TOKENS,
        "system": SYSTEM,
        "thinking": {"type": "adaptive"},
        "tools": [{"name": n, "input_schema": schema} for n, schema in SCHEMAS.items()],
        "messages": said,
    }
    while True:
        if is_streamed:
            with client.messages.stream(**request) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**request)
        if answer.stop_reason != "tool_use":
            return answer.content[-1].text
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": FUNCTIONS[block.name](**block.input),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        said.append({"role": "assistant", "content": answer.content})
        said.append({"role": "user", "content": results})


def tool_runner(prompt: str, is_streamed: bool) -> str:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=TOKENS,
        system=SYSTEM,
        thinking={"type": "adaptive"},
        tools=[anthropic.beta_tool(function) for function in FUNCTIONS.values()],
        messages=[{"role": "user", "content": prompt}],
        stream=is_streamed,
    )
    for each in runner:
        answer = each.get_final_message() if is_streamed else each
    return answer.content[-1].text


def chat(prompt: str, is_streamed: bool) -> str:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    said: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": prompt},
    ]
    functions = [{"name": n, "parameters": schema} for n, schema in SCHEMAS.items()]
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": TOKENS,
        "tools": [{"type": "function", "function": function} for function in functions],
        "messages": said,
    }
    while True:
        if is_streamed:
            usage = {"include_usage": True}
            with client.chat.completions.stream(**request, stream_options=usage) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**request).choices[0].message
        if not message.tool_calls:
            return message.content
        said.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            said.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(prompt: str, is_streamed: bool) -> str:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    items: list[Any] = [{"role": "user", "content": prompt}]
    request: dict[str, Any] = {
        "model": MODEL,
        "instructions": SYSTEM,
        "tools": [
            {"type": "function", "name": n, "parameters": schema, "strict": False}
            for n, schema in SCHEMAS.items()
        ],
        "input": items,
        "store": False,
    }
    while True:
        if is_streamed:
            with client.responses.stream(**request) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**request)
        made = [item for item in answer.output if item.type == "function_call"]
        if not made:
            return answer.output_text
        items += answer.output
        for call in made:
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


if VARIANT in ("messages", "tool_runner"):
    import anthropic
else:
    import openai
sessions({f.__name__: f for f in (messages, tool_runner, chat, responses)}[VARIANT])
