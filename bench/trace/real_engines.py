"""The swarm in small on two real CPU engines: all on one of them, ours, and in turn.

The first stands for the ideal: one engine whose cache holds the whole trace. It is not
quite that, for two calls that arrive together compute what they share twice. Caches are
emptied between the arms. `load_max_over_mean` is of prompt tokens computed. Engines,
router and load generator share the cores, so the times compare arms and no more.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from sgl_ext_cpu.node import local_model, running_node

from bench.trace.agents import TraceConfig
from bench.trace.run import figures, send

TRACE = TraceConfig(sessions=10, calls=12, scale=0.1, pace=1, ramp_s=10)
_LIMIT_S = 240.0
_COUNTER = "sglang:uncached_prompt_tokens_histogram_sum"


def measure_real(trace: TraceConfig) -> dict[str, Any]:
    """Both policies' figures. Raises RuntimeError if a call failed."""
    found: dict[str, Any] = {"workers": 2, "engines": "real"}
    with (
        tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder,
        running_node(local_model("tiny"), Path(folder), "--instances", "2") as node,
    ):
        arms = {"one_engine": node.engines[:1], "ours": (node.url,), "round_robin": node.engines}
        ideal = None
        for name, urls in arms.items():
            node.flush()
            before = node.metric_by_engine(_COUNTER)
            outcome = send(urls, trace, _LIMIT_S, None, separate_reasoning=False)
            loads = [b - a for a, b in zip(before, node.metric_by_engine(_COUNTER), strict=True)]
            found[name] = figures(outcome, ideal)
            found[name]["load_max_over_mean"] = round(max(loads) / statistics.mean(loads), 3)
            ideal = ideal or found[name]["cached_ratio"]
            print(f"real {name}: {found[name]}", file=sys.stderr)
    return {**found, "sessions": trace.sessions, "requests": found["ours"]["requests"]}
