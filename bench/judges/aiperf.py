"""aiperf: several turns on three protocols, and its own traces of coding agents, replayed."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from sgl_ext_cpu.peers import install_package

from bench.judges.judged import Judged, Load, Setting, run_command

VERSION = "0.13.0"

_ENDPOINTS = {
    "messages": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
}
_TOKENIZER = "bench/tokenizer"
_COMMIT = "0" * 40
_STREAMS = 2
_BLOCK_TOKENS = 64
# The shape of aiperf's default at a twentieth of the tokens and a tenth of the gaps.
_AGENTS = {
    "new_tokens_per_turn": {"mean": 300, "median": 250, "max": 800, "bias": 1.1},
    "generation_length": {"mean": 16, "median": 12, "max": 32},
    "inter_turn_delay": {
        "agentic_fraction": 0.7,
        "agentic_delay": {"mean": 250, "median": 180, "max": 1000},
        "human_delay": {"mean": 1000, "median": 800, "max": 2000},
        "max": None,
    },
    "reset": {"base_probability": 0.01, "context_scaling": 1.5},
    "max_prompt_tokens": 6000,
    "block_size": _BLOCK_TOKENS,
    "cache": {
        "layer1_tokens": 1600,
        "layer1_5_tokens": 0,
        "layer2": {"mean": 500, "median": 300, "max": 1000},
        "layer1_5_groups": {"num_groups": 1, "zipf_alpha": 0.6},
    },
}


def loads(setting: Setting) -> dict[str, Load]:
    """Conversations on each protocol, and a replay of agents on chat completions.

    Each of its runs starts many processes: in quick form conversations are on one protocol.
    """
    is_quick = setting.size == "quick"
    sessions, turns = (4, 4) if is_quick else (12, 5)
    hub = make_hub(setting.model, setting.scratch / "hub")
    flags = {
        "num-conversations": sessions,
        "conversation-turn-mean": turns,
        "conversation-turn-stddev": 0,
        "shared-system-prompt-length": 1024,
        "isl": 200,
        "osl": 16,
        "osl-stddev": 0,
    }
    found = {
        name: Load(path, sessions * turns, partial(_run, setting, hub, name, flags))
        for name, path in _ENDPOINTS.items()
        if name == "messages" or not is_quick
    }
    trace = _synthesize(setting, 3 if is_quick else 8)
    lines = len(trace.read_text().splitlines())
    replay = {
        "input-file": trace,
        "custom-dataset-type": "mooncake_trace",
        "isl-block-size": _BLOCK_TOKENS,
        "num-conversations": 3 if is_quick else 8,
    }
    run = partial(_run, setting, hub, "chat", replay)
    return {**found, "agentic-code": Load(_ENDPOINTS["chat"], lines, run)}


def make_hub(model: Path, folder: Path) -> Path:
    """A hub's cache, to be `HF_HOME`, that holds this model's tokenizer as `bench/tokenizer`.

    aiperf decodes a trace in processes that take a name from the cache and refuse a path.
    """
    repository = folder / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    for path in (*model.glob("*.json"), *model.glob("*.jinja")):
        shutil.copyfile(path, snapshot / path.name)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(_COMMIT)
    return folder


def parse(text: str) -> Judged:
    """`profile_export_aiperf.json` of a run."""
    result: dict[str, Any] = json.loads(text)

    def of(metric: str, statistic: str = "avg") -> float | None:
        value = (result.get(metric) or {}).get(statistic)
        return None if value is None else float(value)

    prompt, read = of("total_usage_prompt_tokens"), of("total_usage_prompt_cache_read_tokens")
    return Judged(
        int(of("request_count") or 0),
        int(of("error_request_count") or 0),
        of("time_to_first_token", "p50") or 0.0,
        of("time_to_first_token", "p99") or 0.0,
        of("output_token_throughput_per_user", "p50"),
        of("output_token_throughput") or 0.0,
        of("request_throughput") or 0.0,
        read / prompt if prompt and read is not None else None,
    )


def _run(
    setting: Setting, hub: Path, endpoint: str, work: dict[str, Any], url: str, folder: Path
) -> Judged:
    shutil.rmtree(folder, ignore_errors=True)
    flags = {
        "model": setting.served,
        "tokenizer": _TOKENIZER,
        "url": url,
        "endpoint-type": endpoint,
        "concurrency": _STREAMS,
        "random-seed": 1,
        "export-level": "summary",
        "artifact-dir": folder / "out",
        "ui": "none",
        **work,
    }
    command = [str(install()), "-m", "aiperf", "profile", "--streaming", "--no-server-metrics"]
    command += ["--no-gpu-telemetry", "--use-server-token-count"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    run_command(command, folder, {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"})
    (report,) = (folder / "out").rglob("profile_export_aiperf.json")
    return parse(report.read_text())


def _synthesize(setting: Setting, sessions: int) -> Path:
    config, output = setting.scratch / "agents.json", setting.scratch / "agents"
    config.write_text(json.dumps(_AGENTS))
    command = [str(install()), "-m", "aiperf", "synthesize", "agentic-code", "--seed", "1"]
    command += ["--num-sessions", str(sessions), "--config", str(config), "--output", str(output)]
    run_command(command, output)
    (trace,) = output.rglob("dataset.jsonl")
    return trace


def install() -> Path:
    """The Python that it is installed for."""
    return install_package("aiperf", VERSION)
