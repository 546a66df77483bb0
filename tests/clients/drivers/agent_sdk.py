"""claude-agent-sdk, with the Claude Code that it brings: its own tools, on files of this folder."""

from __future__ import annotations

import asyncio
import os
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def ask(prompt: str) -> None:
    options = ClaudeAgentOptions(model=os.environ["NODE_MODEL"], permission_mode="acceptEdits")
    async for message in query(prompt=prompt, options=options):
        if isinstance(message, ResultMessage):
            assert not message.is_error, message
            print(message.result)


asyncio.run(ask(sys.argv[1]))
