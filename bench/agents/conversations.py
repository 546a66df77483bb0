"""Agents' conversations, always the same: each turn has one right answer at temperature 0.

All share a system prompt, and each grows by a message a turn; or their texts and lengths are
those of a trace's agents. A conversation goes through one protocol. In `/v1/messages` and
`/v1/chat/completions` the agent's earlier answers are made up; in `/v1/responses` they are the
model's own, so that a turn can continue a stored response.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.agents.judge import CHAT, MESSAGES, RESPONSES, Answer
from bench.lib.pin_load import Texts
from bench.trace.agents import Agent

PATHS = (MESSAGES, CHAT, RESPONSES)
PRIORITIES = (0, 0, 5, 20)
_SYSTEM_WORDS = 300
_TURN_WORDS = (40, 160)
_ANSWER_TOKENS = (8, 24, 60, 160)
_ANSWER = "I have read it, and I will go on with the next file of the list."
_MARK = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
_ARGUMENTS = {"type": "object", "properties": {"path": {"type": "string"}}}
_TOOL = {"name": "read_file", "description": "Reads a file."}


@dataclass(frozen=True)
class Turn:
    """One request. body: with the whole history, as an engine alone needs it.

    marked: the same with cache marks, which change no answer.
    newest: of a response, the input that follows the stored history.
    """

    name: str
    path: str
    body: dict[str, Any]
    marked: dict[str, Any]
    newest: list[dict[str, Any]] = field(default_factory=list)

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])

    def continuing(self, response: str) -> dict[str, Any]:
        """The body that continues this stored response."""
        return self.body | {"input": self.newest, "previous_response_id": response}


class Conversation:
    """One agent's turns, at most so many. priority: the agent's. traced: the agent of a trace."""

    def __init__(
        self, number: int, turns: int, model: str, texts: Texts, traced: Agent | None = None
    ) -> None:
        self.number = number
        self.path = PATHS[number % len(PATHS)]
        self.priority = PRIORITIES[number // len(PATHS) % len(PRIORITIES)]
        self._model = model
        chance = random.Random(f"conversation {number}")
        self._system = "You read files. " + texts.words("system", _SYSTEM_WORDS)
        self._asked = [
            f"Agent {number}, turn {turn}. "
            + texts.words(f"agent {number}, turn {turn}", chance.randint(*_TURN_WORDS))
            for turn in range(turns)
        ]
        self._tokens = [chance.choice(_ANSWER_TOKENS) for _ in range(turns)]
        if traced is not None:
            self._system = "You read files. " + traced.opening()
            self._asked = [turn.text() for turn in traced.turns[:turns]]
            self._tokens = [turn.answer_tokens for turn in traced.turns[:turns]]
        self._streams = [chance.random() < 0.6 for _ in self._asked]

    @property
    def turns(self) -> int:
        return len(self._asked)

    def turn(self, number: int, answered: Sequence[Answer]) -> Turn:
        """A turn, given the answers to all earlier ones."""
        name = f"{self.path}, agent {self.number}, turn {number}"
        usual = {"model": self._model, "temperature": 0, "stream": self._streams[number]}
        make = {CHAT: self._chat, MESSAGES: self._message, RESPONSES: self._response}[self.path]
        return make(name, usual, number, answered)

    def _chat(self, name: str, usual: dict[str, Any], number: int, _: object) -> Turn:
        body = usual | {
            "max_tokens": self._tokens[number],
            "messages": [{"role": "system", "content": self._system}, *self._history(number)],
            "tools": [{"type": "function", "function": {**_TOOL, "parameters": _ARGUMENTS}}],
        }
        if usual["stream"]:
            body["stream_options"] = {"include_usage": True}
        return Turn(name, self.path, body, body)

    def _message(self, name: str, usual: dict[str, Any], number: int, _: object) -> Turn:
        messages = self._history(number)
        body = usual | {
            "max_tokens": self._tokens[number],
            "system": [{"type": "text", "text": self._system}],
            "messages": messages,
            "tools": [{**_TOOL, "input_schema": _ARGUMENTS}],
        }
        last = {"role": "user", "content": [{"type": "text", "text": self._asked[number], **_MARK}]}
        marked = body | {
            "system": [{"type": "text", "text": self._system, **_MARK}],
            "messages": [*messages[:-1], last],
        }
        return Turn(name, self.path, body, marked)

    def _response(
        self, name: str, usual: dict[str, Any], number: int, answered: Sequence[Answer]
    ) -> Turn:
        entered: list[dict[str, Any]] = []
        for asked, answer in zip(self._asked, answered[:number], strict=False):
            entered += [{"role": "user", "content": asked}, *answer.items]
        newest = [{"role": "user", "content": self._asked[number]}]
        body = usual | {
            "max_output_tokens": self._tokens[number],
            "instructions": self._system,
            "input": entered + newest,
            "reasoning": {"effort": "none"},
            "tools": [{"type": "function", **_TOOL, "parameters": _ARGUMENTS}],
        }
        return Turn(name, self.path, body, body, newest)

    def _history(self, number: int) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        for asked in self._asked[:number]:
            said.append({"role": "user", "content": asked})
            said.append({"role": "assistant", "content": _ANSWER})
        return [*said, {"role": "user", "content": self._asked[number]}]
