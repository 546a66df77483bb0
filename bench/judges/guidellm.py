"""guidellm: the load grows from run to run, up to near what stock SGLang can answer."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sgl_ext_cpu.peers import install_package

from bench.judges.judged import Judged, Load, Setting, run_command

VERSION = "0.8.1"

# Each of its workers imports torch, and its loader tokenizes in a forked process.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
}
_ENDPOINT = "/v1/chat/completions"
_SHARES = {"quick": (0.7,), "full": (0.2, 0.4, 0.6, 0.8)}


def loads(setting: Setting) -> dict[str, Load]:
    """One load a rate: shares of what stock SGLang answers."""
    requests = 16 if setting.size == "quick" else 48
    return {
        f"{share:.0%} of capacity": Load(
            _ENDPOINT, requests, partial(_run, setting, requests, share * setting.capacity_per_s)
        )
        for share in _SHARES[setting.size]
    }


def parse(text: str) -> Judged:
    """The JSON report of a run with one rate."""
    (benchmark,) = json.loads(text)["benchmarks"]
    answered: list[dict[str, Any]] = benchmark["requests"]["successful"]
    wrong = len(benchmark["requests"]["errored"]) + len(benchmark["requests"]["incomplete"])
    ttft_ms = sorted(request["time_to_first_token_ms"] for request in answered)
    between_ms = [request["inter_token_latency_ms"] for request in answered]
    rates = [1000 / value for value in between_ms if value]
    cached = [request["cached_tokens"] for request in answered]
    prompts = sum(request["prompt_tokens"] for request in answered)
    known = [tokens for tokens in cached if tokens is not None]
    metrics = benchmark["metrics"]
    return Judged(
        len(answered),
        wrong,
        statistics.median(ttft_ms),
        ttft_ms[min(len(ttft_ms) - 1, int(0.99 * len(ttft_ms)))],
        statistics.median(rates) if rates else None,
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["requests_per_second"]["successful"]["mean"],
        sum(known) / prompts if known else None,
    )


def _run(setting: Setting, requests: int, rate_per_s: float, url: str, folder: Path) -> Judged:
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "report.json"
    output.unlink(missing_ok=True)
    data = setting.scratch / f"guidellm-{requests}.jsonl"
    data.write_text("".join(_lines(requests)))
    flags = {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "model": setting.served,
            "request_format": _ENDPOINT,
        },
        "tokenizer": {"kind": "hf_auto", "model": str(setting.model)},
        "data": {"kind": "json_file", "path": str(data)},
        "seed": {"kind": "static", "value": 1},
        "profile": {"kind": "constant", "rate": round(rate_per_s, 3)},
        "constraint": {"kind": "max_requests", "count": requests},
        "output": {"kind": "json", "path": str(output)},
    }
    command = [str(install()), "-m", "guidellm", "run", "--disable-console"]
    command += [word for name, value in flags.items() for word in (f"--{name}", json.dumps(value))]
    run_command(command, folder, _ENVIRONMENT)
    return parse(output.read_text())


def _lines(requests: int) -> Iterator[str]:
    """Prompts that begin with one of five long system prompts, and end in text of their own."""
    for number in range(requests):
        line = {
            "system_prompt": " ".join(f"Rule {n} of project {number % 5}." for n in range(150)),
            "prompt": " ".join(f"Step {n} of task {number}." for n in range(30)),
            "output_tokens_count": 16,
        }
        yield json.dumps(line) + "\n"


def install() -> Path:
    """The Python that it is installed for."""
    # It needs some torch: ours is built for what this machine has.
    return install_package("guidellm", VERSION, f"torch=={version('torch')}")
