"""What does a session header at token 0 cost, and does the strip avoid that cost?

Our node and a stock SGLang engine. Requests in Claude Code's shape go to `/v1/messages`. All of a
length have the same long prefix, each has a short question of its own, and the header changes with
each request, as Claude Code's does. Arms:

    ours                  our node, which strips the header
    stock                 SGLang without the plugin
    stock_without_header  the same, with prompts that have no header

A round is one request of each arm, in an order that rotates. `by_length` has the TTFTs by the
length of the prompt. The run is not valid unless stock SGLang finds nothing cached with the header
and the prefix without it. `tokens_per_s_ratio` is our engine over stock while requests do
nothing but decode; `decoding` also has our engine behind its balancer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sgl_ext_cpu.node import Node

from bench.lib.capacity import measured
from bench.lib.clients import MESSAGES, Answer, ask_once, clients
from bench.lib.engines import OURS, STOCK, chosen, engine_parser, model_of, page_size, rotated
from bench.lib.script import Size, precondition, require, run
from bench.lib.spread import ratio_spread, spread
from bench.lib.texts import Texts, fitted
from bench.lib.throughput import compared

_HEADER = "x-anthropic-billing-header"


def request_body(document: str, question: str, *, has_header: bool) -> dict[str, Any]:
    """A request in Claude Code's shape: a header block, an identity, a long block, tools."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system: list[dict[str, Any]] = [
        {"type": "text", "text": "You are a coding agent, working in a terminal.", **mark},
        {"type": "text", "text": document, **mark},
    ]
    if has_header:
        version = f"2.1.{time.perf_counter_ns()}"
        line = f"{_HEADER}: cc_version={version}; cc_entrypoint=sdk-cli;"
        system.insert(0, {"type": "text", "text": line})
    tools = [
        {
            "name": name,
            "description": f"{name}s a file of the project.",
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
        for name in ("Read", "Write", "Edit", "Glob", "Grep")
    ]
    content = [{"type": "text", "text": question, **mark}]
    return {
        "model": "bench",
        "max_tokens": 2,
        "system": system,
        "tools": tools,
        "messages": [{"role": "user", "content": content}],
    }


def ask(node: Node, document: str, question: str, *, has_header: bool) -> Answer:
    """One answer, to its end."""
    return ask_once(node, MESSAGES, request_body(document, question, has_header=has_header))


def fitted_document(node: Node, prompt_tokens: int) -> str:
    """Text at hand, cut so that a whole prompt has about so many tokens on this model."""
    text = Texts().source[: prompt_tokens * 8]

    def tokens(document: str) -> int:
        body = request_body(document, "?", has_header=False)
        counted = node.post(f"{MESSAGES}/count_tokens", body)
        counted.raise_for_status()
        return int(counted.json()["input_tokens"])

    others = tokens("none")
    return text[: int(len(text) * (prompt_tokens - others) / (tokens(text) - others))]


@dataclass(frozen=True)
class Plan:
    """How many rounds, and the tokens of prompts, the longest last."""

    rounds: int
    lengths: tuple[int, ...] = (4_000, 16_000, 32_000, 52_000)
    decode_rounds: int = 5


PLANS: dict[Size, Plan] = {
    "full": Plan(15, decode_rounds=9),
    "quick": Plan(3, (4_000, 16_000, 52_000)),
    "brief": Plan(3, (4_000, 52_000), 3),
    "smallest": Plan(1, (1_000, 2_000), 1),
}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    engines = chosen(options, model_of(options.size, "bench"))
    with engines.serving({"ours": OURS, "stock": STOCK}) as nodes:
        run("header_strip", partial(measure_all, nodes, plan))


def measure_all(nodes: Mapping[str, Node], plan: Plan) -> dict[str, Any]:
    """All figures, on running nodes."""
    document = fitted_document(nodes["ours"], plan.lengths[-1])
    by_length = measure_lengths(nodes, plan, document)
    check_equal_token_ids(nodes["ours"], document)
    return {"by_length": by_length, **asyncio.run(decode(nodes, plan))}


async def decode(nodes: Mapping[str, Node], plan: Plan) -> dict[str, Any]:
    """Tokens per second of ours and stock."""
    texts = fitted(nodes["ours"])
    urls = {name: node.engines[0] for name, node in nodes.items()}
    urls["balancer"] = nodes["ours"].url
    async with clients() as http:
        capacity = await measured(http, urls["stock"], texts)
        found = await compared(http, urls, texts, capacity, plan.decode_rounds)
    return {"capacity": capacity.document(), **found}


def measure_lengths(nodes: Mapping[str, Node], plan: Plan, document: str) -> dict[str, Any]:
    """TTFTs by the length of the prompt, as planned."""
    sent = {
        "stock": (nodes["stock"], True),
        "ours": (nodes["ours"], True),
        "stock_without_header": (nodes["stock"], False),
    }
    found: dict[str, Any] = {}
    for tokens in plan.lengths:
        text = document[: len(document) * tokens // plan.lengths[-1]]
        for name in ("ours", "stock_without_header"):
            node, has_header = sent[name]
            warm = ask(node, text, "warm-up", has_header=has_header)
        ms: dict[str, list[float]] = {name: [] for name in sent}
        for number in range(plan.rounds):
            for name in rotated(list(sent), number):
                node, has_header = sent[name]
                question = f"Question {number}, {tokens} tokens?"
                seen = ask(node, text, question, has_header=has_header)
                ms[name].append(seen.ttft_ms)
                is_cold = seen.cached_tokens < 0.1 * tokens
                wanted = "stock SGLang finds nothing cached after a header, and a prefix without"
                precondition(is_cold == (name == "stock"), wanted, arm=name, length=tokens)
        found[str(tokens)] = {
            "prompt_tokens": warm.prompt_tokens,
            **{f"{name}_ms": spread(values, 1) for name, values in ms.items()},
            "stock_over_ours": ratio_spread(ms["stock"], ms["ours"], 2),
        }
    return found


def check_equal_token_ids(node: Node, document: str) -> None:
    """A prompt must have the same token ids with the header and without it."""

    def token_ids(system: list[dict[str, Any]]) -> list[int]:
        body = {
            "model": "bench",
            "max_tokens": 1,
            "return_prompt_token_ids": True,
            "messages": [
                {"role": "system", "content": "\n".join(block["text"] for block in system)},
                {"role": "user", "content": "?"},
            ],
        }
        answer = node.post("/v1/chat/completions", body)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
        return ids

    plain, headed = (
        request_body(document, "?", has_header=has_header)["system"] for has_header in (False, True)
    )
    require(token_ids(plain) == token_ids(headed), "the strip leaves the token ids as they were")
    # And through /v1/messages: with the header, all whole pages before the last token are cached.
    tokens = ask(node, document, "equal?", has_header=False).prompt_tokens
    stripped, page = ask(node, document, "equal?", has_header=True), page_size(node)
    require(
        (stripped.prompt_tokens, stripped.cached_tokens) == (tokens, (tokens - 1) // page * page),
        "a stripped prompt finds all of the plain one cached",
        plain_tokens=tokens,
        stripped=stripped,
    )


if __name__ == "__main__":
    main()
