"""SGLang's bench_serving: shared prefixes, several turns, random ids, Mooncake's format, and its
`agentic-trace`, for which recorded sessions (`bench/recorded`) are written in its format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.judges.judged import Judged, Load, Setting, run_command
from bench.recorded.real_engines import Step, short_enough, steps
from bench.recorded.sessions import find_file, made_sessions, read_sessions

BACKENDS = {
    "sglang": "/generate",
    "sglang-oai": "/v1/completions",
    "sglang-oai-chat": "/v1/chat/completions",
    "vllm": "/v1/completions",
    "vllm-chat": "/v1/chat/completions",
}
"""The backends that work against a node, and the endpoint that each uses."""

_ANSWER_TOKENS = 8
_STREAMS = 2


def loads(setting: Setting) -> dict[str, Load]:
    """Two data sets; at full size all four, and shared prefixes with every backend."""
    groups, prompts = (2, 2) if setting.size == "smallest" else (6, 4)
    found = {
        "shared-prefix": _load(setting, "sglang-oai-chat", _shared(groups, prompts, 1)),
        "turns": _load(setting, "sglang-oai-chat", _shared(groups, 2, 3), 3),
        "random-ids": _load(setting, "sglang", _random(groups * prompts)),
        "mooncake": _load(setting, "sglang", _mooncake(setting, groups, prompts)),
        "agentic-trace": _agentic(setting, groups, 2 * prompts),
    }
    if setting.size != "full":
        del found["turns"], found["random-ids"]
        return found
    for backend in BACKENDS:
        load = _load(setting, backend, _shared(groups, prompts, 1))
        found[f"shared-prefix, {backend}"] = load
    del found["shared-prefix"]
    return found


def parse(text: str) -> Judged:
    """The only line of `--output-file` of a run with `--output-details`."""
    result: dict[str, Any] = json.loads(text)
    per_token_ms = result["median_tpot_ms"]
    report = result.get("cache_report")
    errors = sum(bool(error) for error in result["errors"])
    return Judged(
        result["completed"],
        errors,
        result["median_ttft_ms"],
        result["p99_ttft_ms"],
        1000 / per_token_ms if per_token_ms else None,
        result["output_throughput"],
        result["request_throughput"],
        report["cache_hit_rate_pct"] / 100 if report else None,
    )


def _load(setting: Setting, backend: str, data: dict[str, Any], turns: int = 1) -> Load:
    run = partial(_run, setting, backend, data)
    return Load(BACKENDS[backend], data["num-prompts"] * turns, run)


def _run(setting: Setting, backend: str, data: dict[str, Any], url: str, folder: Path) -> Judged:
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "result.jsonl"
    output.unlink(missing_ok=True)
    flags = {
        "base-url": url,
        "backend": backend,
        "model": setting.model,
        "served-model-name": setting.served,
        "seed": 1,
        "max-concurrency": _STREAMS,
        "warmup-requests": 0,
        "output-file": output,
        **data,
    }
    command = [sys.executable, "-m", "sglang.benchmark.serving"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command += ["--output-details", "--disable-tqdm"]
    if backend.startswith("sglang"):
        command.append("--cache-report")
    # It stores its prompts in its home, under a name that does not include the tokenizer.
    run_command(command, folder, {"HOME": str(setting.scratch), "PYTHONWARNINGS": "ignore"})
    return parse(output.read_text())


def _shared(groups: int, prompts: int, turns: int) -> dict[str, Any]:
    return {
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": groups,
        "gsp-prompts-per-group": prompts,
        "gsp-num-turns": turns,
        "gsp-system-prompt-len": 1024,
        "gsp-question-len": 64,
        "gsp-output-len": _ANSWER_TOKENS,
        "num-prompts": groups * prompts,
    }


def _random(prompts: int) -> dict[str, Any]:
    return {
        "dataset-name": "random-ids",
        "random-input-len": 1024,
        "random-output-len": _ANSWER_TOKENS,
        "random-range-ratio": 1,
        "num-prompts": prompts,
    }


def _mooncake(setting: Setting, sessions: int, turns: int) -> dict[str, Any]:
    path = setting.scratch / f"mooncake-{sessions}-{turns}.jsonl"
    interval_ms = 1000 / (0.6 * setting.capacity_per_s)
    path.write_text("".join(_mooncake_lines(sessions, turns, interval_ms)))
    return {
        "dataset-name": "mooncake",
        "dataset-path": path,
        "mooncake-num-rounds": 1,
        "num-prompts": sessions * turns,
    }


def _agentic(setting: Setting, people: int, turns: int) -> Load:
    path = setting.scratch / f"agentic-{people}-{turns}.json"
    found = find_file()
    sessions = made_sessions(400) if found is None else read_sessions(found)
    chosen = short_enough([one for one in sessions if one.is_judging])[:people]
    conversations = [_conversation(steps(one, f"{n}", turns)) for n, one in enumerate(chosen)]
    path.write_text(json.dumps({"metadata": {}, "conversations": conversations}))
    data = {
        "dataset-name": "agentic-trace",
        "dataset-path": path,
        "sharegpt-output-len": _ANSWER_TOKENS,
        "num-prompts": len(conversations),
    }
    requests = sum(map(len, conversations))
    return Load(
        BACKENDS["sglang-oai-chat"], requests, partial(_run, setting, "sglang-oai-chat", data)
    )


def _conversation(played: Sequence[Step]) -> list[dict[str, Any]]:
    """The new messages of each turn, up to the first that rewrites what was before it: its format
    has no rewritten history."""
    before: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for step in played:
        body = step.body
        texts = [("system", body["system"]), *((m["role"], m["content"]) for m in body["messages"])]
        now = [{"role": role, "content": parts[0]["text"]} for role, parts in texts]
        if now[: len(before)] != before or now == before:
            break
        found.append({"messages": now[len(before) :]})
        before = now
    return found


def _mooncake_lines(sessions: int, turns: int, interval_ms: float) -> Iterator[str]:
    """Sessions that share their first four blocks and grow by two blocks a turn, interleaved."""
    for number in range(sessions * turns):
        turn, session = divmod(number, sessions)
        own = range(1000 * (session + 1), 1000 * (session + 1) + 2 * (turn + 1))
        blocks = [*range(4), *own]
        line = {
            "timestamp": round(number * interval_ms),
            "input_length": 512 * len(blocks),
            "output_length": _ANSWER_TOKENS,
            "hash_ids": blocks,
        }
        yield json.dumps(line) + "\n"
