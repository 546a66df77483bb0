"""How many tokens per second both arms generate, one stream at a time and several at once.

The prompt is cached, so that decoding is most of what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sgl_ext_cpu.node import Node

from bench.lib.pin_load import MESSAGES, Texts
from bench.lib.script import require
from bench.lib.spread import ratio_spread, spread
from bench.lib.warm.load import Conversation, ask

LEAST_OF_STOCK = 0.98
"""Ours generates at least so many of stock's tokens per second."""
_FEWEST_ROUNDS = 3
_PROMPT_TOKENS = 4_000
_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Rate:
    """So many rounds of answers of so many tokens. An answer takes a second or more, so that what
    follows the first token once does not count for much."""

    rounds: int = 7
    answer_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens per second of one arm in one round: of the median stream when several run, of a stream
    alone, and of all streams together."""

    stream: float
    alone: float
    total: float


def measure_rate(nodes: Mapping[str, Node], texts: Texts, rate: Rate) -> dict[str, list[Generated]]:
    """What each node generates in each round, in alternation."""
    chat = Conversation("rate", texts)
    chat.grow_to(min(_PROMPT_TOKENS, 40 * rate.answer_tokens))
    body = chat.body(MESSAGES, rate.answer_tokens)
    for node in nodes.values():
        ask(node, MESSAGES, body)
    seen: dict[str, list[Generated]] = {name: [] for name in nodes}
    for number in range(rate.rounds):
        for name in list(nodes)[:: 1 if number % 2 else -1]:
            seen[name].append(_generate(nodes[name], body))
    return seen


def _generate(node: Node, body: bytes) -> Generated:
    alone = ask(node, MESSAGES, body)
    begun_s = time.monotonic()
    with ThreadPoolExecutor(_STREAMS) as pool:
        answers = list(pool.map(lambda _: ask(node, MESSAGES, body), range(_STREAMS)))
    took_s = time.monotonic() - begun_s
    return Generated(
        statistics.median(answer.tokens_per_s for answer in answers),
        alone.tokens_per_s,
        sum(answer.answer_tokens for answer in answers) / took_s,
    )


def rate_figures(seen: Mapping[str, Sequence[Generated]]) -> dict[str, Any]:
    """Both arms, and ours over stock. Raises InvariantBroken if ours is slower in every round of
    three or more: fewer say too little."""
    result: dict[str, Any] = {"streams": _STREAMS}
    for figure in ("stream", "alone", "total"):
        values = {arm: [getattr(one, figure) for one in rounds] for arm, rounds in seen.items()}
        ratio = ratio_spread(values["ours"], values["stock"])
        require(
            ratio["max"] >= LEAST_OF_STOCK or ratio["rounds"] < _FEWEST_ROUNDS,
            "ours generates as many tokens per second as stock in one round at least",
            figure=figure,
            most=ratio["max"],
        )
        result[figure] = {
            **{arm: spread(each, 1) for arm, each in values.items()},
            "ours_of_stock": ratio,
            "holds": ratio["median"] >= LEAST_OF_STOCK,
        }
    return result
