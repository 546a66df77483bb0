"""A client of `/generate`, and a load of batch requests at once with interactive ones beside them.

This path says how often a request was preempted, and takes a priority in its body. Every answer is
streamed, greedy and of a fixed length, and what its client saw of it is an `Answer`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from bench.lib.texts import Texts

GENERATE = "/generate"
BATCH, INTERACTIVE = 0, 10
_SEEN = re.compile(rb'"num_retractions":(\d+).*"completion_tokens":(\d+)')


@dataclass(frozen=True)
class Request:
    """One request. at_s: when it is sent, from the start of its round."""

    text: str
    answer_tokens: int
    priority: int = BATCH
    at_s: float = 0.0

    @property
    def body(self) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": self.answer_tokens, "temperature": 0, "ignore_eos": True
        }  # fmt: skip
        return {"text": self.text, "priority": self.priority, "sampling_params": sampling}


@dataclass
class Answer:
    """One request as its client saw it. Moments are from the start of its round.

    first_s: when its first token came; None if none did. ended_s: when it was answered whole.
    preempted: how often it lost its slot or its memory.
    answered_tokens: those it had been answered with at these moments.
    prompt_tokens, cached_tokens: known once it is answered whole.
    """

    request: Request
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    preempted: int = 0
    tokens: int = 0
    answered_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def wait_s(self) -> float:
        """For its first token; inf if there was none."""
        return float("inf") if self.first_s is None else self.first_s - self.sent_s

    def take(self, event: bytes, now_s: float) -> None:
        """One event of the stream."""
        found = _SEEN.search(event)
        if found is None:
            return
        preempted, tokens = map(int, found.groups())
        self.answered_tokens += (preempted - self.preempted) * self.tokens
        self.preempted, self.tokens = preempted, tokens
        if tokens and self.first_s is None:
            self.first_s = now_s
        if tokens == self.request.answer_tokens:
            whole = json.loads(event)
            self.output_ids = whole["output_ids"]
            self.prompt_tokens = whole["meta_info"]["prompt_tokens"]
            self.cached_tokens = whole["meta_info"].get("cached_tokens", 0)
            self.ended_s = now_s


@dataclass(frozen=True)
class Load:
    """A round's requests, a fifth of them interactive.

    offsets: when the interactive ones come, in shares of the time that the batch takes by itself.

    Answers of the batch are half as long to half as long again: as long as each other, they
    would all end at once, and an arm that delays one would be charged with idle slots.
    """

    batch: int
    batch_tokens: tuple[int, int]
    interactive_tokens: tuple[int, int]
    offsets: tuple[float, ...]

    def requests(self, texts: Texts, name: str, batch_s: float = 1.0) -> list[Request]:
        """The same for the same name. Tokens are of the prompt and of its answer.

        batch_s: how long the batch takes by itself on these engines.
        """
        prompt, answer = self.batch_tokens
        lengths = random.Random(name)
        batch = [
            Request(
                texts.fresh(f"{name}, batch {n}", prompt),
                lengths.randint(answer // 2, answer + answer // 2),
            )
            for n in range(self.batch)
        ]
        return batch + [
            self.interactive(texts, f"{name}, interactive {n}", offset * batch_s)
            for n, offset in enumerate(self.offsets)
        ]

    def with_batch(self, count: int) -> Load:
        """The same with so large a batch: still a fifth is interactive, within the same times."""
        few = self.offsets
        number = max(len(few), count // 4)
        if number == len(few):
            return replace(self, batch=count)
        step = (few[-1] - few[0]) / (number - 1)
        return replace(self, batch=count, offsets=tuple(few[0] + step * n for n in range(number)))

    def interactive(self, texts: Texts, name: str, at_s: float = 0.0) -> Request:
        """One interactive request."""
        prompt, answer = self.interactive_tokens
        return Request(texts.fresh(name, prompt), answer, INTERACTIVE, at_s)


def sent_beside_batch(answers: Sequence[Answer]) -> int:
    """How many interactive requests were sent while a batch request had still to be answered."""
    ends = [answer.ended_s or 0.0 for answer in answers if answer.request.priority == BATCH]
    return sum(answer.sent_s < max(ends) for answer in answers if answer.request.priority != BATCH)


def queues_found(answers: Sequence[Answer]) -> list[int]:
    """How many requests waited for their first token when each interactive request was sent."""
    return [
        sum(
            other.sent_s < one.sent_s < other.sent_s + other.wait_s
            for other in answers
            if other is not one
        )
        for one in answers
        if one.request.priority != BATCH
    ]


async def ask(http: aiohttp.ClientSession, url: str, request: Request, started: float) -> Answer:
    """Sends a request when it is due and reads its answer to the end."""
    await asyncio.sleep(max(0.0, started + request.at_s - time.perf_counter()))
    answer = Answer(request, time.perf_counter() - started)
    try:
        async with http.post(url + GENERATE, json=request.body | {"stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.take(line[6:], time.perf_counter() - started)
    except aiohttp.ClientError:
        answer.ended_s = None
    return answer


async def play(http: aiohttp.ClientSession, url: str, requests: Sequence[Request]) -> list[Answer]:
    """Sends each request in its time, whatever has become of the others, until all are over."""
    started = time.perf_counter()
    return await asyncio.gather(*(ask(http, url, request, started) for request in requests))
