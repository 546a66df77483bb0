"""pydantic-ai: `chat`, `responses` and `messages`."""

from __future__ import annotations

import asyncio

from loop import FUNCTIONS, KEY, MODEL, SYSTEM, URL, VARIANT, sessions
from pydantic_ai import Agent


def model() -> object:
    if VARIANT == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    kind = OpenAIChatModel if VARIANT == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=provider)


async def ask(prompt: str, is_streamed: bool) -> str:
    agent = Agent(model(), instructions=SYSTEM, tools=list(FUNCTIONS.values()))
    if not is_streamed:
        return (await agent.run(prompt)).output
    # `run_stream` ends at the first text, and `iter` goes through the whole loop.
    async with agent.iter(prompt) as running:
        async for step in running:
            if Agent.is_model_request_node(step):
                async with step.stream(running.ctx) as stream:
                    async for _ in stream:
                        pass
    return running.result.output


sessions(lambda prompt, is_streamed: asyncio.run(ask(prompt, is_streamed)))
