"""What does a session header at token 0 cost, and does the strip avoid that cost?

One real engine. Requests in Claude Code's shape go to `/v1/messages`. All have the same long
prefix, and each has a short question of its own. Arms:

    stable    no header
    varying   a header line that changes with each request and is not stripped
    stripped  the same line under the name that the engine strips

The varying arm's line has a name that the engine does not strip. A round is one varying
request, which computes its whole prompt, then pairs of the other two arms in alternating
order. The times are medians of TTFTs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import requests
from sgl_ext_cpu.node import Node

from bench.lib.engines import chosen, engine_parser, model_of, page_size
from bench.lib.script import Size, require, run

_WARM_ARMS = ("stable", "stripped")
_NAMES = {"varying": "x-unstripped-billing-header", "stripped": "x-anthropic-billing-header"}


@dataclass
class Arm:
    """What one arm saw: TTFTs in milliseconds and cached prompt tokens, one a round."""

    ttft_ms: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How many rounds, pairs of warm requests in each, and tokens of a prompt."""

    rounds: int
    pairs: int = 16
    prompt_tokens: int = 52_000


PLANS: dict[Size, Plan] = {
    "full": Plan(15),
    "quick": Plan(3),
    "brief": Plan(3),
    "smallest": Plan(1, 2, 2_000),
}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    engines = chosen(options, model_of(options.size, "bench"))
    with (
        tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder,
        engines.ours(Path(folder)) as node,
    ):
        run("header_strip", partial(measure, node, plan))


def measure(node: Node, plan: Plan) -> dict[str, Any]:
    """Runs the arms on a running node and returns the bench's figures."""
    document = fitted_document(node, plan.prompt_tokens)
    arms = {name: Arm() for name in ("varying", *_WARM_ARMS)}
    prompt_tokens = usage_of(ask(node, "stable", document, "warm-up")).prompt_tokens
    is_fitted = abs(prompt_tokens - plan.prompt_tokens) <= 0.1 * plan.prompt_tokens
    require(is_fitted, "a prompt has the tokens of the plan", prompt_tokens=prompt_tokens)
    a_round = ("varying", *(*_WARM_ARMS, *_WARM_ARMS[::-1]) * (plan.pairs // 2))
    for number, name in enumerate(a_round * plan.rounds):
        started = time.perf_counter()
        events = stream(node, name, document, f"Question {number}: what now?")
        usage = next(events)
        arms[name].ttft_ms.append((time.perf_counter() - started) * 1000)
        for _ in events:
            pass
        arms[name].cached_tokens.append(usage_of(usage).cached_tokens)
    for name in _WARM_ARMS:
        least = min(arms[name].cached_tokens)
        require(least > 0.9 * prompt_tokens, "a warm arm finds its prefix cached", least=least)
    most = max(arms["varying"].cached_tokens)
    require(most < 0.1 * prompt_tokens, "the varying arm finds nothing cached", most=most)
    check_equal_token_ids(node, document)
    ms = {name: statistics.median(arm.ttft_ms) for name, arm in arms.items()}
    return {
        "prompt_tokens": prompt_tokens,
        "rounds": plan.rounds,
        **{f"{name}_ms": round(value, 1) for name, value in ms.items()},
        "stripped_over_stable": round(ms["stripped"] / ms["stable"], 3),
        "varying_over_stripped": round(ms["varying"] / ms["stripped"], 2),
        "cached_tokens": {n: int(statistics.median(a.cached_tokens)) for n, a in arms.items()},
        "equal_token_ids": True,
    }


def request_body(arm: str, document: str, question: str, **more: Any) -> dict[str, Any]:
    """A request in Claude Code's shape: a header block, an identity, a long block, tools."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system: list[dict[str, Any]] = [
        {"type": "text", "text": "You are a coding agent, working in a terminal.", **mark},
        {"type": "text", "text": document, **mark},
    ]
    if arm in _NAMES:
        version = f"2.1.{time.perf_counter_ns()}"
        line = f"{_NAMES[arm]}: cc_version={version}; cc_entrypoint=sdk-cli;"
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
        "temperature": 0,
        "system": system,
        "tools": tools,
        "messages": [{"role": "user", "content": content}],
        **more,
    }


def ask(node: Node, arm: str, document: str, question: str) -> dict[str, Any]:
    """One answer, whole; returns its usage."""
    answer = node.post("/v1/messages", request_body(arm, document, question))
    answer.raise_for_status()
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def stream(node: Node, arm: str, document: str, question: str) -> Iterator[dict[str, Any]]:
    """One answer, streamed: yields the usage at its first event, then an empty dict an event."""
    body = request_body(arm, document, question, stream=True)
    with requests.post(f"{node.url}/v1/messages", json=body, stream=True, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "error":
                raise RuntimeError(event["error"]["message"])
            yield event["message"]["usage"] if event["type"] == "message_start" else {}


class Usage(NamedTuple):
    """An answer's prompt tokens, and those of them that were cached."""

    prompt_tokens: int
    cached_tokens: int


def usage_of(usage: dict[str, Any]) -> Usage:
    """An Anthropic usage, whose `input_tokens` are neither read from the cache nor put there."""
    cached = usage.get("cache_read_input_tokens") or 0
    created = usage.get("cache_creation_input_tokens") or 0
    return Usage(usage["input_tokens"] + created + cached, cached)


def fitted_document(node: Node, prompt_tokens: int) -> str:
    """Text at hand, cut so that a whole prompt has about so many tokens on this model."""
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    text = "\n".join(path.read_text(errors="replace") for path in sources)[: prompt_tokens * 8]

    def tokens(document: str) -> int:
        body = request_body("stable", document, "?")
        counted = node.post("/v1/messages/count_tokens", body)
        counted.raise_for_status()
        return int(counted.json()["input_tokens"])

    others = tokens("none")
    return text[: int(len(text) * (prompt_tokens - others) / (tokens(text) - others))]


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

    plain, headed = (request_body(arm, document, "?")["system"] for arm in ("stable", "stripped"))
    require(token_ids(plain) == token_ids(headed), "the strip leaves the token ids as they were")
    # And through /v1/messages: with the header, all whole pages before the last token are cached.
    plain_tokens = usage_of(ask(node, "stable", document, "equal?")).prompt_tokens
    usage = usage_of(ask(node, "stripped", document, "equal?"))
    page = page_size(node)
    require(
        usage == (plain_tokens, (plain_tokens - 1) // page * page),
        "a stripped prompt finds all of the plain one cached",
        plain_tokens=plain_tokens,
        usage=usage,
    )


if __name__ == "__main__":
    main()
