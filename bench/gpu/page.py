"""The report as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.report.tables import flat, is_spread, shown, table

_CPU_RUN = (
    "**This is a run on the CPU platform: this machine has no GPU. It shows that the report "
    "itself works, and nothing about a GPU. Its loads are the smallest ones, so that its times "
    "mean little.**"
)
_DETAILS = ("bench", "stages_ms", "counters")
_QUESTIONS = {
    "header_strip": "A changing header at token 0: TTFT with it, and with the strip",
    "warm_turn": "A turn whose prefix is cached, stock and ours",
    "decoding": "Tokens a second of 8 and of 32 streams, ours over stock",
    "host_tier": "Pins that spill to the host and come back: answers that differ",
    "fanout": "Sub-agents that start at once with the same cold prefix: tokens computed, and TTFT",
    "priority": "Interactive requests beside a batch that is more than the engine holds",
    "pin_flood": "A pinned prefix under a flood larger than the cache",
    "speculative_prefill": "The next turn, prefilled ahead while a person thinks",
}


def page(report: Mapping[str, Any]) -> str:
    """The page of a report's document."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    steps = {step["name"]: step for step in report["steps"]}
    yield from (f"# {'CPU' if report['is_cpu'] else 'GPU'} report", "")
    if report["is_cpu"]:
        yield from (_CPU_RUN, "")
    wrong = [name for name, step in steps.items() if step["status"] != "ok"]
    ended = f"failed: {', '.join(wrong)}" if wrong else "all steps ended well"
    yield f"`make gpu-report`, {report['began']}, {report['seconds']:.0f} s: {ended}."
    if report["model"]:
        yield f"Model: random weights in the shape `{report['model']}`."
    yield "`report.json` has all figures."
    yield ""
    rows = [
        (name, step["status"], f"{step['seconds']:.0f}", step["why"])
        for name, step in steps.items()
    ]
    yield from table(("step", "ended", "s", "why"), rows)
    yield from _environment(steps.get("environment", {}).get("figures", {}))
    yield from _facts(steps.get("facts", {}).get("figures", {}))
    yield from _equality(steps)
    for name, question in _QUESTIONS.items():
        if figures := steps.get(name, {}).get("figures"):
            yield from ("", f"## {name}", "", f"{question}.", "")
            yield from table(("figure", "value"), list(_figures(figures)))
    for step in steps.values():
        if step["log_end"]:
            yield from ("", f"## Logs of {step['name']}", "", "```")
            yield from step["log_end"].replace("```", "'''").splitlines()
            yield "```"


def _environment(found: Mapping[str, Any]) -> Iterator[str]:
    if not found:
        return
    rows: list[tuple[str, Any]] = []
    for gpu in found["gpus"] if isinstance(found["gpus"], list) else ():
        rows += [(f"GPU {gpu['index']}: {name}", value) for name, value in gpu.items()]
    if isinstance(found["gpus"], str):
        rows.append(("GPUs", found["gpus"]))
    others = found["others_on_gpus"]
    if isinstance(others, list) and others:
        rows.append(("other processes on GPUs", f"{len(others)}: times may be off"))
    rows += [(name, found[name]) for name in ("system", "python", "cores", "memory_gib")]
    rows += [("shared memory, GiB", found["shared_memory_gib"]), ("commit", found["commit"])]
    rows += [(f"torch: {name}", value) for name, value in found["torch"].items()]
    rows += sorted(found["packages"].items())
    rows += [(name, value or "not installed") for name, value in found["tools"].items()]
    rows += sorted(found["variables"].items())
    yield from ("", "## Environment", "")
    yield from table(("", ""), rows)


def _facts(found: Mapping[str, Any]) -> Iterator[str]:
    if not found:
        return
    yield from ("", "## What SGLang chose", "", "Read in the running scheduler:", "")
    yield from table(("", ""), list(found["made"].items()))
    yield from ("", "Its arguments as it resolved them:", "")
    yield from table(("", ""), list(found["resolved"].items()))
    rows = [(name, value) for name, value in flat({"memory": found["memory"] or {}})]
    rows.append(("first start, s", found["start_s"]))
    rows += [(f"first requests of {n}, ms", t) for n, t in found["first_requests_ms"].items()]
    yield from ("", "Memory and first requests, with what is compiled at first use:", "")
    yield from table(("", ""), rows)
    if found["warnings"]:
        yield from ("", "Warnings in the engine's log:", "", "```", *found["warnings"], "```")


def _equality(steps: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    names = ("equality", "equality_deterministic")
    for name in names:
        if found := steps.get(name, {}).get("figures"):
            yield from ("", f"## Greedy {name.replace('_', ', ')}", "", found["explanation"], "")
            head = f"answers that differ from stock's, of {found['prompts']}"
            firsts = found["first_difference"]
            rows = [
                (arm, count, firsts.get(arm, ""), found["preempted"][arm])
                for arm, count in found["differing"].items()
            ]
            yield from table(("arm", head, "first at token", "preemptions"), rows)
            yield from ("", f"{found['pinned_tokens']} tokens were pinned.")


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in flat(found, _DETAILS):
        yield name, shown(value) if is_spread(value) else value
