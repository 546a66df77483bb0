"""What an engine can do with its model, measured at the start of a bench: loads are set from it.

A load of a fixed size drives a slow engine past its capacity, and a fast one not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import aiohttp

from bench.lib.generate import Answer, Request, play
from bench.lib.texts import Texts

_PREFILL_TOKENS, _PREFILL_S = 2_000, 0.3
_DECODE_TOKENS, _DECODE_S, _MOST_DECODE_TOKENS = 16, 0.4, 512
_PROMPT_TOKENS = 40


@dataclass(frozen=True)
class Capacity:
    """What one engine computes and holds.

    prefill_per_s: tokens a second of a prompt of which nothing is cached.
    decode_per_s: tokens a second of all `streams` together.
    pool_tokens: what its KV pool holds. slots: how many requests it runs at once.
    """

    prefill_per_s: float
    decode_per_s: float
    streams: int
    pool_tokens: int
    slots: int

    def seconds(self, prompt_tokens: float, answer_tokens: float) -> float:
        """How long the engine takes for so many tokens, with all streams in use."""
        return prompt_tokens / self.prefill_per_s + answer_tokens / self.decode_per_s

    def requests_for(
        self, span_s: float, prompt_tokens: int, answer_tokens: int, *, least: int, most: int
    ) -> int:
        """How many requests of this size keep the engine busy for so long, within both bounds."""
        one_s = self.seconds(prompt_tokens, answer_tokens)
        return min(most, max(least, math.ceil(span_s / one_s)))

    def prompt_for(self, span_s: float, *, least: int, most: int) -> int:
        """How many prompt tokens it prefills in so long, within both bounds."""
        return min(most, max(least, math.ceil(span_s * self.prefill_per_s)))

    def answer_for(self, span_s: float) -> int:
        """How many tokens each stream decodes in so long: at least 16, at most 512."""
        each = math.ceil(span_s * self.decode_per_s / self.streams)
        return min(_MOST_DECODE_TOKENS, max(_DECODE_TOKENS, each))

    def document(self) -> dict[str, Any]:
        """The figures for a bench's last line."""
        return {name: round(value) for name, value in asdict(self).items()}


async def measured(
    http: aiohttp.ClientSession, url: str, texts: Texts, streams: int = 8
) -> Capacity:
    """Measures an idle engine for about a second. Nothing of it is cached for the bench."""
    async with http.get(f"{url}/v1/loads", params={"include": "core"}) as response:
        response.raise_for_status()
        load = (await response.json())["loads"][0]
    pool, slots = int(load["max_total_num_tokens"]), int(load["max_running_requests"])
    streams = min(streams, slots)
    # The first requests of an engine are slower than all others.
    await play(http, url, _requests(texts, "Warm-up", 100, 4, streams))
    prefill = await _prefill_per_s(http, url, texts, most=pool // 4)
    decode = await _decode_per_s(http, url, texts, streams)
    return Capacity(prefill, decode, streams, pool, slots)


async def _prefill_per_s(
    http: aiohttp.ClientSession, url: str, texts: Texts, *, most: int
) -> float:
    for number in count():
        tokens = min(_PREFILL_TOKENS << number, most)
        (answer,) = await play(http, url, _requests(texts, f"Prefill {number}", tokens, 1, 1))
        if answer.wait_s >= _PREFILL_S or tokens == most:
            break
    return tokens / answer.wait_s


async def _decode_per_s(http: aiohttp.ClientSession, url: str, texts: Texts, streams: int) -> float:
    for number in count():
        tokens = min(_DECODE_TOKENS << number, _MOST_DECODE_TOKENS)
        sent = _requests(texts, f"Decode {number}", _PROMPT_TOKENS, tokens, streams)
        rates = stream_rates(await play(http, url, sent))
        if len(rates) < streams:
            raise RuntimeError("an engine did not answer its first requests whole")
        if tokens / max(rates) >= _DECODE_S or tokens == _MOST_DECODE_TOKENS:
            break
    return sum(rates)


def stream_rates(answers: Sequence[Answer]) -> list[float]:
    """Tokens a second after the first one, of each answer that is whole and has several."""
    return [
        (answer.tokens - 1) / (answer.ended_s - answer.first_s)
        for answer in answers
        if answer.first_s is not None and answer.ended_s is not None and answer.tokens > 1
    ]


def _requests(texts: Texts, name: str, prompt: int, answer: int, streams: int) -> list[Request]:
    return [
        Request(texts.fresh(f"Capacity, {name}, {number}", prompt), answer)
        for number in range(streams)
    ]
