"""Profiling through the balancer: every engine writes its trace, and serves on."""

from __future__ import annotations

from pathlib import Path

from sgl_ext_cpu.node import Node


def test_every_engine_writes_a_trace(node: Node, tmp_path: Path) -> None:
    ask = {"text": "go", "sampling_params": {"max_new_tokens": 1}}
    started = node.post("/start_profile", {"output_dir": str(tmp_path)})
    assert started.status_code == 200
    assert len(started.json()) == len(node.engines)
    assert node.post("/generate", ask).ok
    assert node.post("/stop_profile", None).status_code == 200
    assert len(list(tmp_path.rglob("*.trace.json.gz"))) == len(node.engines)
    assert node.post("/generate", ask).ok
