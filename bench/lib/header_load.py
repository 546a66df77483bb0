"""What bench/header_strip sends: requests in Claude Code's shape, with its header or without."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import requests
from sgl_ext_cpu.node import Node

_NAMES = {"varying": "x-unstripped-billing-header", "stripped": "x-anthropic-billing-header"}


class Timed(NamedTuple):
    """A request's TTFT, and the prompt tokens that it found cached."""

    ttft_ms: float
    cached_tokens: int


def timed(node: Node, arm: str, document: str, question: str) -> Timed:
    """Streams one answer to its end."""
    started = time.perf_counter()
    events = stream(node, arm, document, question)
    usage = next(events)
    ttft_ms = (time.perf_counter() - started) * 1000
    for _ in events:
        pass
    return Timed(ttft_ms, usage_of(usage).cached_tokens)


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
