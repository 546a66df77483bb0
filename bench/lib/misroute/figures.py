"""The figures of a run of bench/misroute: in total, and phase by phase."""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.lib.misroute.events import Diary
from bench.lib.misroute.judge import LAG_S, Judge, Line
from bench.lib.misroute.load import Sent

_SHARED = ("retried", "within_lag", "evicted_in_queue", "stale", "unwithdrawn", "dead_worker")


@dataclass
class Done:
    """What was done to the engines. Times are seconds of the wall clock."""

    kills: list[tuple[float, str]] = field(default_factory=list)
    flushes: int = 0
    flush_lags_ms: list[float] = field(default_factory=list)
    evicted_tokens: float = 0.0
    down_s: list[float] = field(default_factory=list)


def counted(page: str, name: str) -> dict[str, float]:
    """A counter on a page of metrics, by its labels."""
    found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def figures(
    done: Done, diary: Diary, requests: Sequence[Sent], lines: Sequence[Line], page: str
) -> dict[str, Any]:
    """The bench's figures, in total and by phase. `page` is the balancer's `/metrics`."""
    judge = Judge(diary, done.kills)
    phases: defaultdict[str, Counter[str]] = defaultdict(Counter)
    bare = judge.without_events(lines)
    for place, line in enumerate(lines):
        phases[line.sent.phase] += judge.verdicts(line) + bare[place]
        phases[line.sent.phase][f"placed_{line.reason}"] += 1
    for sent in requests:
        phases[sent.phase][sent.outcome] += 1
        if sent.why:
            print(f"{sent.phase}: {sent.outcome}: {sent.why}", file=sys.stderr)
    whole: Counter[str] = Counter()
    for counts in phases.values():
        whole += counts
    faults: Counter[str] = Counter()
    for labels, value in counted(page, "sgl_ext_prefix_event_faults_total").items():
        faults[re.findall(r'fault="(\w+)"', labels)[0]] += int(value)
    back_s = [at + down for (at, _), down in zip(done.kills, done.down_s, strict=True)]
    return {
        **summary(whole),
        "flushes": done.flushes,
        "kills": len(done.kills),
        "down_s": done.down_s,
        "requests_after_return": sum(
            line.worker == engine and line.arrived_s > at
            for line in lines
            for at, (_, engine) in zip(back_s, done.kills, strict=True)
        ),
        "evicted_tokens": int(done.evicted_tokens),
        "removals_published": diary.removals,
        "event_lines": diary.lines,
        "event_gaps": diary.gaps,
        "event_faults": dict(faults),
        "predicted_tokens": sum(line.predicted for line in lines),
        "reported_tokens": sum(line.reported for line in lines),
        "reports_not_booked": sum(not line.is_booked for line in lines),
        "lag_s": LAG_S,
        "flush_heard_after_answer_ms": spread(done.flush_lags_ms),
        "stored_heard_after_first_byte_ms": spread(judge.store_lags_ms(lines)),
        "phases": {name: summary(counts) for name, counts in phases.items()},
    }


def summary(counts: Counter[str]) -> dict[str, Any]:
    """Shares and counts of one phase, or of all phases."""
    requests = max(counts["requests"], 1)
    return {
        "requests": counts["requests"],
        "misrouted_share": round(counts["misrouted"] / requests, 4),
        "mispredicted_share": round(counts["mispredicted"] / requests, 4),
        "misrouted_share_without_events": round(counts["misrouted_without_events"] / requests, 4),
        "mispredicted_share_without_events": round(
            counts["mispredicted_without_events"] / requests, 4
        ),
        "lost_before_first_byte": counts["lost"],
        "cut_after_first_byte": counts["cut"],
        "unjudged": counts["answered"] - counts["requests"],
        **{name: counts[name] for name in _SHARED},
        "placed": {
            name.removeprefix("placed_"): count
            for name, count in sorted(counts.items())
            if name.startswith("placed_")
        },
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    if len(values) < 2:
        return {}
    parts = statistics.quantiles(values, n=100, method="inclusive")
    found = {"p50": parts[49], "p99": parts[98], "max": max(values)}
    return {name: round(value, 1) for name, value in found.items()}
