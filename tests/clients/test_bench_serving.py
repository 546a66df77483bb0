"""SGLang's own load generator against the balancer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sgl_ext_cpu.node import Node

_GROUPS, _PROMPTS, _SHARED, _OWN, _ANSWER = 4, 4, 512, 32, 8


@pytest.mark.slow
def test_every_request_completes_and_prefixes_are_shared(
    node: Node, tiny_model: Path, tmp_path: Path
) -> None:
    _chat(node)
    assert _chat(node) > 0

    output = tmp_path / "result.jsonl"
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--base-url", node.url]
    command += ["--backend", "sglang-oai-chat", "--model", str(tiny_model), "--flush-cache"]
    command += ["--dataset-name", "generated-shared-prefix", "--seed", "1"]
    command += ["--gsp-num-groups", str(_GROUPS), "--gsp-prompts-per-group", str(_PROMPTS)]
    command += ["--gsp-system-prompt-len", str(_SHARED), "--gsp-question-len", str(_OWN)]
    command += ["--gsp-output-len", str(_ANSWER), "--num-prompts", str(_GROUPS * _PROMPTS)]
    command += ["--max-concurrency", "1", "--cache-report", "--disable-tqdm"]
    command += ["--output-file", str(output), "--output-details"]
    done = subprocess.run(
        command,
        # It keeps the prompts it made in its home, under a name without the tokenizer's.
        env={**os.environ, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    result = json.loads(output.read_text())
    assert result["completed"] == _GROUPS * _PROMPTS
    assert result["errors"] == [""] * result["completed"]
    assert result["total_output_tokens"] == result["completed"] * _ANSWER
    # All but the first prompt of a group find its shared part: 71 % of all tokens.
    assert result["cache_report"]["cache_hit_rate_pct"] >= 65
    # And what was cached before is gone: the flush reached the engine that held it.
    assert _chat(node) < 10


def _chat(node: Node) -> int:
    """Asks one fixed question, and returns how much of it was in the cache."""
    question = "Was this question in the cache before the load generator flushed it?"
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 1}
    usage = node.post("/v1/chat/completions", body).json()["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
