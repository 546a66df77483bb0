"""What did SGLang choose here, and how long does a first start take?

Prints what the scheduler of our engine in the group `wide` has (classes, page size, overlap,
CUDA graphs), what SGLang resolved its arguments to, and how long the start and the first requests
took: kernels that are compiled at their first use show in these.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from bench.gpu.groups import FACTS
from bench.lib.engines import Engines, chosen, engine_parser
from bench.lib.generate import GENERATE, Request
from bench.lib.script import require, run
from bench.lib.texts import Texts

RESOLVED = (
    *("device", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("sampling_backend", "grammar_backend", "fp8_gemm_runner_backend", "moe_runner_backend"),
    *("page_size", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests"),
    *("mem_fraction_static", "kv_cache_dtype", "schedule_policy", "enable_priority_scheduling"),
    *("disable_overlap_schedule", "radix_cache_backend", "load_format"),
)
_WARNING = ("WARNING", "WARN ", "Warning:", "falling back", "Rollback")
_MOST_WARNINGS = 20


def main() -> None:
    engines = chosen(engine_parser(__doc__).parse_args(), "tiny")
    run("facts", lambda: measure(engines))


def measure(engines: Engines) -> dict[str, Any]:
    """The facts of our engine."""
    node = engines.running_node("ours")
    times_ms = first_requests_ms(node)
    info = requests.get(f"{node.engines[0]}/server_info", timeout=60).json()
    state = info["internal_states"][0]
    written = node.log_dir / FACTS
    require(written.exists(), "the scheduler writes what it made")
    return {
        "start_s": engines.running["start_s"],
        "first_requests_ms": times_ms,
        "made": json.loads(written.read_text()),
        "resolved": {name: state.get(name) for name in RESOLVED} | graphs(state),
        "memory": state.get("memory_usage"),
        "warnings": warnings(node.log_dir),
    }


def graphs(state: dict[str, Any]) -> dict[str, str]:
    """How CUDA graphs are made, of each phase."""
    phases: dict[str, Any] = state.get("cuda_graph_config") or {}
    return {
        f"CUDA graphs of {name}": f"{phase.get('backend')}, up to {phase.get('max_bs')}"
        for name, phase in phases.items()
    }


def first_requests_ms(node: Node) -> dict[str, list[float]]:
    """The times of the first three requests of each length: for one token, and for 32."""
    texts, found = Texts(), dict[str, list[float]]()
    for words, tokens in ((100, 1), (1000, 1), (100, 32)):
        times = []
        for number in range(3):
            request = Request(texts.fresh(f"First {words}, {tokens}, {number}", words), tokens)
            started = time.perf_counter()
            node.post(GENERATE, request.body).raise_for_status()
            times.append(round((time.perf_counter() - started) * 1000, 1))
        found[f"{words} words, {tokens} tokens"] = times
    return found


def warnings(log_dir: Path) -> list[str]:
    """Lines of the engine's log that warn."""
    logs = sorted(log_dir.glob("engine*.log"))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    found = [line.strip()[:300] for line in lines if any(word in line for word in _WARNING)]
    return list(dict.fromkeys(found))[:_MOST_WARNINGS]


if __name__ == "__main__":
    main()
