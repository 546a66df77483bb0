"""What does a session header at token 0 cost, and does the strip give it all back?

Three arms through `/v1/messages` on one real engine, in Claude Code's block
shape, the same long prefix and a fresh short question in each:

    stable    no header
    varying   a header line that changes each request, not stripped
    stripped  the same line under the name that is stripped

The varying arm carries its line under a name the engine was not told to strip,
which is what an engine without the strip makes of it. A round is one varying
request, which prefills everything, then pairs of the other two, whose order
alternates. Figures are TTFTs; what is reported are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import Node, local_model, running_node

PROMPT_TOKENS = 52_000
_WARM_ARMS = ("stable", "stripped")
_NAMES = {"varying": "x-unstripped-billing-header", "stripped": "x-anthropic-billing-header"}


@dataclass
class Arm:
    """What one arm saw: TTFTs in milliseconds and cached prompt tokens, one a round."""

    ttft_ms: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--model", type=Path, help="a model directory (default: the local bench one)"
    )
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 15)
    model = options.model or local_model("bench")
    with (
        tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder,
        running_node(model, Path(folder)) as node,
    ):
        print(json.dumps(measure(node, rounds)))


def measure(node: Node, rounds: int) -> dict[str, Any]:
    """Runs the arms on a running node and returns the bench's figures."""
    document = fitted_document(node)
    arms = {name: Arm() for name in ("varying", *_WARM_ARMS)}
    warm = ask(node, "stable", document, "warm-up")
    prompt_tokens = sum(tokens_of(warm))
    a_round = ("varying", *(*_WARM_ARMS, *_WARM_ARMS[::-1]) * 8)
    for number, name in enumerate(a_round * rounds):
        started = time.perf_counter()
        events = stream(node, name, document, f"Question {number}: what now?")
        usage = next(events)
        arms[name].ttft_ms.append((time.perf_counter() - started) * 1000)
        for _ in events:
            pass
        arms[name].cached_tokens.append(usage.get("cache_read_input_tokens") or 0)
    ms = {name: statistics.median(arm.ttft_ms) for name, arm in arms.items()}
    return {
        "bench": "header_strip",
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        **{f"{name}_ms": round(value, 1) for name, value in ms.items()},
        "stripped_over_stable": round(ms["stripped"] / ms["stable"], 3),
        "varying_over_stripped": round(ms["varying"] / ms["stripped"], 2),
        "cached_tokens": {n: int(statistics.median(a.cached_tokens)) for n, a in arms.items()},
        "equal_token_ids": equal_token_ids(node, document),
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


def tokens_of(usage: dict[str, Any]) -> tuple[int, int]:
    """New and cached prompt tokens of an answer."""
    return usage["input_tokens"], usage.get("cache_read_input_tokens") or 0


def fitted_document(node: Node) -> str:
    """Text at hand, cut so that a whole prompt is about PROMPT_TOKENS long on this model."""
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    text = "\n".join(path.read_text(errors="replace") for path in sources)[: PROMPT_TOKENS * 8]
    body = request_body("stable", text, "?")
    counted = node.post("/v1/messages/count_tokens", body)
    counted.raise_for_status()
    return text[: int(len(text) * PROMPT_TOKENS / counted.json()["input_tokens"])]


def equal_token_ids(node: Node, document: str) -> bool:
    """Whether the engine makes the same token ids of a prompt with the header and without."""

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
    same_ids = token_ids(plain) == token_ids(headed)
    # And through /v1/messages: asked again behind a header, all but the last token is cached.
    whole = sum(tokens_of(ask(node, "stable", document, "equal?")))
    new, cached = tokens_of(ask(node, "stripped", document, "equal?"))
    return same_ids and (new, cached) == (1, whole - 1)


if __name__ == "__main__":
    main()
