"""openai-agents: `responses`, its default, and `chat`."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from loop import FUNCTIONS, KEY, MODEL, SYSTEM, URL, VARIANT, sessions
from openai import AsyncOpenAI


async def ask(prompt: str, is_streamed: bool) -> str:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    kind = OpenAIResponsesModel if VARIANT == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="reader",
        instructions=SYSTEM,
        # Whoever wants the counts of a stream asks for them.
        model_settings=ModelSettings(include_usage=True),
        model=kind(model=MODEL, openai_client=client),
        tools=[function_tool(function) for function in FUNCTIONS.values()],
    )
    if is_streamed:
        running = Runner.run_streamed(agent, prompt)
        async for _ in running.stream_events():
            pass
        return running.final_output
    return (await Runner.run(agent, prompt)).final_output


set_tracing_disabled(True)
sessions(lambda prompt, is_streamed: asyncio.run(ask(prompt, is_streamed)))
