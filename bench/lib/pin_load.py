"""What bench/pin_flood sends: a conversation that grows, and a flood of prompts that share nothing.

Every answer is streamed, and what its client saw of it is an `Answer`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_FLOOD_TOKENS = (600, 1500)
_FLOOD_ANSWER_TOKENS = 6
_TURN_WORDS = 24
_TURN_ANSWER_TOKENS = 8
_TEXTS = ("content", "reasoning_content", "text", "thinking")
_ANSWER = "I have read it, and I will go on with the next file of the list."


@dataclass
class Answer:
    """One request as its client saw it.

    marked_tokens: through `/v1/messages`, the prompt's tokens up to its last mark.
    answer_tokens: through `/v1/chat/completions`.
    text: of the answer, its thinking included.
    is_whole: it ended as an answer does; false if it was refused, cut or aborted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    marked_tokens: int = 0
    ttft_ms: float = 0.0
    is_whole: bool = False
    answer_tokens: int = 0
    text: str = field(default="", compare=False)


@dataclass
class Flooded:
    """A flood that is over. answers: in the order of its prompts."""

    answers: list[Answer] = field(default_factory=list)
    span_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Prompt tokens that were answered."""
        return sum(answer.prompt_tokens for answer in self.answers if answer.is_whole)


class Texts:
    """Texts out of the standard library's source, by how many tokens they are to have."""

    def __init__(self) -> None:
        paths = sorted(Path(json.__file__).parent.parent.glob("*.py"))
        self.source = "\n".join(path.read_text(errors="replace") for path in paths)
        self._words = self.source.split()
        self._tokens_a_word = 1.0

    def fit(self, tokens: int, words: int) -> None:
        """Says how many tokens a sample of so many words has on this model."""
        self._tokens_a_word = tokens / words

    def fresh(self, name: str, tokens: int) -> str:
        """A text of about so many tokens, that shares no beginning with one of another name."""
        return f"{name}: {self.words(name, round(tokens / self._tokens_a_word))}"

    def words(self, name: str, count: int) -> str:
        """As many words, chosen by the name."""
        return " ".join(random.Random(name).choices(self._words, k=count))

    def flood(self, name: str, tokens: int) -> list[str]:
        """Prompts of so many tokens in all."""
        chance, made = random.Random(name), list[str]()
        while tokens > 0:
            size = chance.randint(*_FLOOD_TOKENS)
            made.append(self.fresh(f"{name}, {len(made)}", size))
            tokens -= size
        return made


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
        self._more = more or {}
        self._said: list[str] = []

    def ask(self) -> dict[str, Any]:
        """The next turn's body."""
        number = len(self._said) + 1
        self._said.append(f"Turn {number}: {self._texts.words(f'turn {number}', _TURN_WORDS)}")
        messages = list(self._messages())
        body: dict[str, Any] = {"model": "tiny", "max_tokens": _TURN_ANSWER_TOKENS}
        if self.path == CHAT:
            usage = {"stream_options": {"include_usage": True}, **self._more}
            system = {"role": "system", "content": self._system}
            return body | usage | {"messages": [system, *messages]}
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


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Answer:
    """Sends one request and reads its stream to the end."""
    seen, started = Answer(), time.perf_counter()
    asked = body | {"temperature": 0, "stream": True}
    try:
        async with http.post(url + path, json=asked) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    seen.is_whole = answer.status == 200
                    continue
                if take(seen, json.loads(line[6:])) and not seen.ttft_ms:
                    seen.ttft_ms = (time.perf_counter() - started) * 1000
    except aiohttp.ClientError:
        seen.is_whole = False
    return seen


def take(seen: Answer, event: dict[str, Any]) -> bool:
    """Takes one event of either protocol; whether it has a part of the answer's text."""
    kind = event.get("type")
    if kind == "message_start":
        usage = event["message"]["usage"]
        seen.cached_tokens = usage.get("cache_read_input_tokens") or 0
        seen.marked_tokens = seen.cached_tokens + (usage.get("cache_creation_input_tokens") or 0)
        seen.prompt_tokens = seen.marked_tokens + usage["input_tokens"]
    elif kind == "message_stop":
        seen.is_whole = True
    elif usage := event.get("usage") if kind is None else None:
        details = usage.get("prompt_tokens_details") or {}
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.answer_tokens = usage.get("completion_tokens") or 0
        seen.cached_tokens = details.get("cached_tokens") or 0
    delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta") or {}
    found = next(filter(None, map(delta.get, _TEXTS)), "")
    seen.text += found
    return kind == "content_block_delta" or bool(found)


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
