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

from bench.lib.texts import Texts
from bench.lib.warm.bodies import BODIES

_SYSTEM_TOKENS, _TOOLS, _TOOL_TOKENS = 1000, 20, 70
_RESULT_TOKENS = 700
_BEFORE_ANSWER = ("response.created", "response.in_progress")


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as its client saw it: monotonic times, and token counts."""

    begin_ns: int
    first_ns: int
    last_ns: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.begin_ns) / 1e6

    @property
    def tokens_per_s(self) -> float:
        """After its first token."""
        return (self.answer_tokens - 1) / max(self.last_ns - self.first_ns, 1) * 1e9


@dataclass
class Conversation:
    """One chat, in the shape in which Claude Code sends it."""

    name: str
    texts: Texts
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    tokens: int = _SYSTEM_TOKENS + _TOOLS * _TOOL_TOKENS
    head: tuple[Any, ...] = ()

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

    def body(self, path: str, answer_tokens: int = 2) -> bytes:
        """A streamed request to `path`."""
        if not self.head:
            text = self.texts.fresh
            tools = [
                {
                    "name": f"Tool{number}",
                    "description": text(f"tool {number}", _TOOL_TOKENS),
                    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
                }
                for number in range(_TOOLS)
            ]
            self.head = (text(f"{self.name}, system", _SYSTEM_TOKENS), tools)
        system, tools = self.head
        return json.dumps(BODIES[path](system, tools, self.messages, answer_tokens)).encode()


def ask(node: Node, path: str, body: bytes) -> Answer:
    """Sends a request and reads its answer to the end.

    The first byte is that of the first event with something of the answer in it: `/v1/responses`
    has two events before.
    """
    usage: dict[str, Any] = {}
    first_ns = last_ns = 0
    # A minimal client, because its own work is not host time.
    client = HTTPConnection(urlsplit(node.url).netloc, timeout=600)
    client.connect()
    with closing(client):
        begin_ns = time.monotonic_ns()
        client.request("POST", path, body, {"content-type": "application/json"})
        answer = client.getresponse()
        while line := answer.readline():
            now_ns = time.monotonic_ns()
            if answer.status != HTTPStatus.OK:
                raise RuntimeError(f"{answer.status}: {line.decode()}")
            if line.startswith(b"event: ") or not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("type") == "error" or "error" in event:
                raise RuntimeError(str(event["error"]))
            if event.get("type") in _BEFORE_ANSWER:
                continue
            first_ns, last_ns = first_ns or now_ns, now_ns
            for holder in (event, event.get("message"), event.get("response")):
                usage |= (holder or {}).get("usage") or {}
    return _answer(begin_ns, first_ns, last_ns, usage)


def _answer(begin_ns: int, first_ns: int, last_ns: int, usage: dict[str, Any]) -> Answer:
    answered = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    prompt = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    if read := usage.get("cache_read_input_tokens"):  # Anthropic counts them beside the others
        cached, prompt = read, prompt + read
    prompt += usage.get("cache_creation_input_tokens") or 0
    return Answer(begin_ns, first_ns, last_ns, prompt, cached, answered)
