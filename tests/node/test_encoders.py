"""A real engine whose prompts are written by DeepSeek V3.2's encoder, and not by a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import StartNode

from tests.waiting import HANG_S

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def said(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, **fields}]}


def test_marked_blocks_are_pinned_and_known_tokens_are_not_made_again(
    start_node: StartNode, tmp_path: Path
) -> None:
    messages = [said("user", "Please look at the file main.py.", **MARK)]
    system = [{"type": "text", "text": "You help with the code. " * 60, **MARK}]
    body = {"model": "tiny", "max_tokens": 1, "system": system, "messages": messages}
    later = [*messages, said("assistant", "It is here."), said("user", "Then run it.", **MARK)]
    with start_node(tmp_path, "--tool-call-parser", "deepseekv32") as node:
        first, second, _ = (
            node.post("/v1/messages", {**body, "messages": each}).json()["usage"]
            for each in (messages, later, later)
        )
        pins = requests.get(f"{node.url}/v1/pins", timeout=HANG_S).json()["pins"]
        metrics = requests.get(f"{node.url}/metrics/engines", timeout=HANG_S).text
        template = requests.get(f"{node.url}/sgl_ext/template", timeout=HANG_S).json()["template"]
    created = first["cache_creation_input_tokens"]
    assert second["cache_read_input_tokens"] >= created > 0
    written = second["cache_read_input_tokens"] + second["cache_creation_input_tokens"]
    tokens = sorted(pin["tokens"] for pin in pins)
    assert len(tokens) == 3
    assert tokens[1:] == [created, written]
    assert "sgl_ext_breakpoints_not_found_total{" not in metrics
    assert template["first system"] == "in place"
    counted = [line for line in metrics.splitlines() if 'source="known"' in line]
    known = [line for line in counted if line.startswith("sgl_ext_prompt_tokens_encoded_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in known) >= written
