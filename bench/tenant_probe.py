"""Does the time to the first token show a tenant that another tenant has sent a prefix?

One real engine and a balancer with keys. A round is four prompts of the same length, each with
a long prefix and then a question of its own:

    a_cold   tenant A sends a new prefix
    a_warm   A sends it again: a cache hit
    b_on_a   tenant B sends A's prefix
    b_cold   B sends a new prefix

The last two alternate in order. The peer shares one cache between all tenants, as SGLang does:
a second node with `--tenant-isolation off`, in the same run. Reported are median TTFTs, medians
of ratios within a round, and how often an attacker would guess right: the share of all pairs of
B's requests in which the one on A's prefix was faster. Chance is 0.5.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import Node, local_model, running_node

from bench.header_strip import Arm
from bench.lib.header_load import usage_of
from bench.lib.script import Size, parser_of, require, run
from sgl_ext import keys

CHANCE_TOKENS = 64
"""Two unrelated prompts share fewer tokens than this, by their template and by chance."""
_ARMS = ("a_cold", "a_warm", "b_on_a", "b_cold")
_WORDS = ("the", "agent", "reads", "a", "file", "and", "writes", "what", "it", "found")


@dataclass(frozen=True)
class Plan:
    """How many rounds, and words of a prefix."""

    rounds: int
    prefix_words: int = 4_000


PLANS: dict[Size, Plan] = {"full": Plan(120), "quick": Plan(30), "smallest": Plan(1, 600)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", type=Path, help="a model directory (default: the local bench one)"
    )
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    model = options.model or local_model("tiny" if options.size == "smallest" else "bench")
    run("tenant_probe", partial(compare, model, plan))


def compare(model: Path, plan: Plan) -> dict[str, Any]:
    """The figures of a node that isolates tenants and of its peer, which does not."""
    isolated, shared = (probe(model, plan, isolation) for isolation in ("auto", "off"))
    seen = isolated["cached_tokens_b_on_a"]
    require(seen < CHANCE_TOKENS, "an isolated tenant finds nothing of the other's", cached=seen)
    seen, least = shared["cached_tokens_b_on_a"], 0.9 * shared["prompt_tokens"]
    require(seen > least, "without isolation a tenant finds the other's prefix", cached=seen)
    return {"rounds": plan.rounds, **isolated, "peer": shared}


def probe(model: Path, plan: Plan, isolation: str) -> dict[str, Any]:
    """The figures of a node with this isolation of tenants."""
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder:
        path = Path(folder) / "keys.toml"
        a, b = (keys.add_key(path, tenant)[0] for tenant in ("a", "b"))
        flags = ("--keys", str(path), "--tenant-isolation", isolation)
        with running_node(model, Path(folder) / "logs", *flags) as node:
            return {"isolation": isolation, **measure(node, a, b, plan)}


def measure(node: Node, a: str, b: str, plan: Plan) -> dict[str, Any]:
    """Runs the rounds with the keys of two tenants, and returns their figures."""
    arms = {name: Arm() for name in _ARMS}
    for key in (a, b):  # warm-up
        ask(node, key, prefix("warm-up", plan.prefix_words))
    for number in range(plan.rounds):
        of_a, unseen = (prefix(f"{who} {number}", plan.prefix_words) for who in "ab")
        first = [("a_cold", a, of_a), ("a_warm", a, of_a)]
        probes = [("b_on_a", b, of_a), ("b_cold", b, unseen)]
        for name, key, text in first + (probes if number % 2 else probes[::-1]):
            ttft_ms, usage = ask(node, key, text)
            arms[name].ttft_ms.append(ttft_ms)
            arms[name].cached_tokens.append(usage_of(usage).cached_tokens)
    prompt_tokens = usage_of(usage).prompt_tokens
    warm = min(arms["a_warm"].cached_tokens)
    require(warm > 0.9 * prompt_tokens, "a tenant finds its own prefix cached", cached=warm)
    cold = max(arms["a_cold"].cached_tokens + arms["b_cold"].cached_tokens)
    require(cold < CHANCE_TOKENS, "a cold prefix is not cached", cached=cold)
    a_cold, a_warm, b_on_a, b_cold = (arms[name].ttft_ms for name in _ARMS)
    return {
        "prompt_tokens": prompt_tokens,
        "b_on_a_over_cold": median_ratio(b_on_a, b_cold),
        "warm_over_cold": median_ratio(a_warm, a_cold),
        "b_on_a_is_faster": round(share_of_faster(b_on_a, b_cold), 3),
        **{f"cached_tokens_{name}": max(arm.cached_tokens) for name, arm in arms.items()},
        **{f"{name}_ms": round(statistics.median(arm.ttft_ms), 1) for name, arm in arms.items()},
    }


def median_ratio(of: list[float], to: list[float]) -> float:
    """The median of the ratios within each round."""
    return round(statistics.median(x / y for x, y in zip(of, to, strict=True)), 3)


def share_of_faster(of: list[float], than: list[float]) -> float:
    """The share of all pairs in which the first is less: the area under the ROC curve."""
    pairs = list(product(of, than))
    return sum(x < y for x, y in pairs) / len(pairs)


def prefix(seed: str, count: int) -> str:
    """A text of so many words, in an order that the seed decides."""
    words = list(_WORDS) * (count // len(_WORDS))
    random.Random(seed).shuffle(words)
    return " ".join(words)


def ask(node: Node, key: str, text: str) -> tuple[float, dict[str, Any]]:
    """One streamed answer: milliseconds to its first token, and its usage."""
    question = f"Question {random.randrange(10**9)}: what now?"
    body: dict[str, Any] = {
        "model": "bench",
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "system": [{"type": "text", "text": text}],
        "messages": [{"role": "user", "content": question}],
    }
    headers = {"authorization": f"Bearer {key}"}
    started = time.perf_counter()
    ttft_ms, usage = 0.0, {}
    with requests.post(
        f"{node.url}/v1/messages", json=body, headers=headers, stream=True, timeout=600
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "error":
                raise RuntimeError(event["error"]["message"])
            if event["type"] == "message_start":
                usage = event["message"]["usage"]
            elif event["type"] == "content_block_start" and not ttft_ms:
                ttft_ms = (time.perf_counter() - started) * 1000
    return ttft_ms, usage


if __name__ == "__main__":
    main()
