"""What bench/warm_turn sends: an agent's chat that grows."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from sgl_ext_cpu.node import Node

from bench.lib.pin_load import MESSAGES, Texts

_SYSTEM_TOKENS, _TOOLS, _TOOL_TOKENS = 1000, 20, 70
_RESULT_TOKENS = 700
_MARK = {"cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as its client saw it: monotonic times, and token counts."""

    begin_ns: int
    first_ns: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.begin_ns) / 1e6


@dataclass
class Conversation:
    """One chat, in the shape in which Claude Code sends it."""

    name: str
    texts: Texts
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    tokens: int = _SYSTEM_TOKENS + _TOOLS * _TOOL_TOKENS

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": "Please tidy up this project."})

    def grow_to(self, tokens: int) -> None:
        """Appends turns until the prompt has about `tokens` tokens."""
        while self.tokens < tokens:
            self.next_turn(_RESULT_TOKENS)

    def next_turn(self, result_tokens: int) -> None:
        """One tool call and its result of about `result_tokens`."""
        self.turns += 1
        call = f"toolu_{self.turns:06}"
        path = {"path": f"src/module_{self.turns}.py"}
        use = {"type": "tool_use", "id": call, "name": "Tool3", "input": path}
        said = {"type": "text", "text": "Now the next file."}
        text = self.texts.fresh(f"{self.name}, result {self.turns}", result_tokens)
        result = {"type": "tool_result", "tool_use_id": call, "content": text}
        self.messages.append({"role": "assistant", "content": [said, use]})
        self.messages.append({"role": "user", "content": [result]})
        self.tokens += result_tokens + 50

    def short_turn(self) -> None:
        """A few words from each side."""
        self.messages.append({"role": "assistant", "content": "Done."})
        self.messages.append({"role": "user", "content": "Go on."})

    def body(self) -> dict[str, Any]:
        """A streamed request to `/v1/messages` for two tokens."""
        *earlier, last = self.messages
        content = last["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        last = {**last, "content": [*content[:-1], {**content[-1], **_MARK}]}
        system = self.texts.fresh(f"{self.name}, system", _SYSTEM_TOKENS)
        tools = [
            {
                "name": f"Tool{number}",
                "description": self.texts.fresh(f"tool {number}", _TOOL_TOKENS),
                "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
            }
            for number in range(_TOOLS)
        ]
        return {
            "model": "bench",
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            "thinking": {"type": "disabled"},
            "system": [{"type": "text", "text": system, **_MARK}],
            "tools": tools,
            "messages": [*earlier, last],
        }


def ask(node: Node, body: bytes) -> Answer:
    """Sends a request and reads its answer to the end."""
    usage: dict[str, int] = {}
    first_ns = 0
    # A minimal client, because its own work is not host time.
    client = HTTPConnection(urlsplit(node.url).netloc, timeout=600)
    client.connect()
    with closing(client):
        begin_ns = time.monotonic_ns()
        client.request("POST", MESSAGES, body, {"content-type": "application/json"})
        answer = client.getresponse()
        while line := answer.readline():
            first_ns = first_ns or time.monotonic_ns()
            if answer.status != HTTPStatus.OK:
                raise RuntimeError(f"{answer.status}: {line.decode()}")
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event["type"] == "error":
                    raise RuntimeError(event["error"]["message"])
                usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
    cached = usage.get("cache_read_input_tokens") or 0
    prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
    return Answer(begin_ns, first_ns, prompt, cached)
