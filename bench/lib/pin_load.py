"""A conversation that grows, and a flood of prompts that share nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.lib.clients import CHAT, MESSAGES, Answer, ask
from bench.lib.texts import Texts

_FLOOD_ANSWER_TOKENS = 6
_TURN_WORDS = 24
_TURN_ANSWER_TOKENS = 8
_ANSWER = "I have read it, and I will go on with the next file of the list."


@dataclass
class Flooded:
    """A flood that is over. answers: in the order of its prompts."""

    answers: list[Answer] = field(default_factory=list)
    span_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Prompt tokens that were answered."""
        return sum(answer.prompt_tokens for answer in self.answers if answer.is_whole)


class Conversation:
    """An agent's conversation: a long system prompt, and a short message more each turn.

    ttl: for how long the system prompt and the last message are marked; "" for no marks.
    more: fields of SGLang's, which only `/v1/chat/completions` takes.
    """

    def __init__(
        self, system: str, texts: Texts, *, ttl: str = "", more: Mapping[str, Any] | None = None
    ) -> None:
        self.path = CHAT if more else MESSAGES
        self._system = system
        self._texts = texts
        self._mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
        self._more = dict(more or {})
        self._said: list[str] = []

    def ask(self) -> dict[str, Any]:
        """The next turn's body."""
        number = len(self._said) + 1
        self._said.append(f"Turn {number}: {self._texts.words(f'turn {number}', _TURN_WORDS)}")
        messages = list(self._messages())
        body: dict[str, Any] = {"model": "tiny", "max_tokens": _TURN_ANSWER_TOKENS}
        if self.path == CHAT:
            system = {"role": "system", "content": self._system}
            return body | self._more | {"messages": [system, *messages]}
        last = {"type": "text", "text": self._said[-1], **self._mark}
        messages[-1] = {"role": "user", "content": [last]}
        blocks = [{"type": "text", "text": self._system, **self._mark}]
        return body | {"system": blocks, "messages": messages}

    def _messages(self) -> Iterator[dict[str, Any]]:
        for place, said in enumerate(self._said):
            if place:
                yield {"role": "assistant", "content": _ANSWER}
            yield {"role": "user", "content": said}


def single(text: str, answer_tokens: int = _FLOOD_ANSWER_TOKENS) -> dict[str, Any]:
    """A request of one message, for `/v1/messages`."""
    message = {"role": "user", "content": text}
    return {"model": "tiny", "max_tokens": answer_tokens, "messages": [message]}


async def flood(
    http: aiohttp.ClientSession, url: str, prompts: Sequence[str], connections: int
) -> Flooded:
    """Sends all prompts, so many at once, each as soon as there is room for it."""
    flooded, waiting = Flooded([Answer() for _ in prompts]), iter(enumerate(prompts))

    async def client() -> None:
        for place, prompt in waiting:
            flooded.answers[place] = await ask(http, url, MESSAGES, single(prompt))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    flooded.span_s = time.perf_counter() - started
    return flooded
