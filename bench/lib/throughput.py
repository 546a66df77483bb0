"""Tokens per second of ours and of stock SGLang: of a stream, and of all streams together.

In turns, each engine answers the same short prompts at once with long answers, so that it does
little else than decode.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from bench.lib.capacity import Capacity, stream_rates
from bench.lib.engines import rotated
from bench.lib.generate import Answer, Request, play
from bench.lib.script import require
from bench.lib.spread import ratio_spread, spread
from bench.lib.texts import Texts

_LEAST = 0.98
_PROMPT_TOKENS, _ROUND_S = 40, 1.0
_JUDGED_ROUNDS = 3


def total_per_s(answers: Sequence[Answer]) -> float:
    """Tokens a second that a round answered with, until the last of these answers was over.

    An answer that was not whole adds nothing.
    """
    whole = [(answer.ended_s, answer.tokens) for answer in answers if answer.ended_s is not None]
    if not whole:
        return 0.0
    return sum(tokens for _, tokens in whole) / max(ended_s for ended_s, _ in whole)


def stream_per_s(answers: Sequence[Answer]) -> float:
    """Tokens a second of one stream after its first token, the median of a round's."""
    rates = stream_rates(answers)
    return statistics.median(rates) if rates else 0.0


def rates(rounds: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """One arm's tokens per second."""
    return {
        "tokens_per_s": spread([total_per_s(answers) for answers in rounds], 1),
        "stream_tokens_per_s_p50": spread([stream_per_s(answers) for answers in rounds], 1),
    }


def comparison(
    ours: Sequence[Sequence[Answer]], stock: Sequence[Sequence[Answer]]
) -> dict[str, Any]:
    """Ours against stock, round by round. `below_stock`: the whole spread is below 0.98."""
    total = ratio_spread(list(map(total_per_s, ours)), list(map(total_per_s, stock)))
    stream = ratio_spread(list(map(stream_per_s, ours)), list(map(stream_per_s, stock)))
    return {
        "tokens_per_s_ratio": total,
        "stream_tokens_per_s_ratio": stream,
        "below_stock": total["max"] < _LEAST,
    }


async def compared(
    http: aiohttp.ClientSession,
    urls: Mapping[str, str],
    texts: Texts,
    capacity: Capacity,
    rounds: int,
) -> dict[str, Any]:
    """Decodes in turns at the engines `ours` and `stock`, which are idle, and returns the figures.

    `balancer` may be another arm: its process shares the cores of the engine, which is reported.
    Raises InvariantBroken if our engine is slower by more than 2 % in all of three rounds or more.
    """
    seen: dict[str, list[list[Answer]]] = {name: [] for name in urls}
    tokens = capacity.answer_for(_ROUND_S)
    for number in range(-1, rounds):  # the first one warms up
        sent = [
            Request(texts.fresh(f"Decoding {number}, {n}", _PROMPT_TOKENS), tokens)
            for n in range(capacity.streams)
        ]
        for name in rotated(list(urls), number):
            answers = await play(http, urls[name], sent)
            if number >= 0:
                seen[name].append(answers)
    found = comparison(seen["ours"], seen["stock"])
    is_slower = found["below_stock"] and rounds >= _JUDGED_ROUNDS
    ratio = found["tokens_per_s_ratio"]
    require(not is_slower, "our engine decodes as many tokens a second as stock", **ratio)
    decoding = {name: rates(answers) for name, answers in seen.items()}
    if "balancer" in seen:
        decoding["balancer"] |= comparison(seen["balancer"], seen["stock"])
    return {**found, "decoding": {"streams": capacity.streams, "answer_tokens": tokens, **decoding}}
