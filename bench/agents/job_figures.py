"""The figures of bench/agents_jobs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.agents.job_run import Played, Sent
from bench.agents.jobs import ROLES
from bench.lib.spread import Spread, ratio_spread

STARVED_S = 30.0
"""A request that waits longer for its first token has starved."""


def arm_figures(rounds: Sequence[Played]) -> dict[str, Any]:
    """One arm's figures over all rounds."""
    jobs_s = [job_s for played in rounds for job_s in played.jobs_s]
    sent = [one for played in rounds for one in played.sent]
    by_role = {role: [one for one in sent if one.role == role] for role in ROLES}
    found: dict[str, Any] = {
        **_percentiles("job", jobs_s),
        "cached_share": _cached_share(sent),
        "cached_share_by_role": {role: _cached_share(ones) for role, ones in by_role.items()},
        "read_write_by_role": {role: _read_write(ones) for role, ones in by_role.items()},
        "throughput_jobs_per_min": round(
            60 * len(jobs_s) / sum(played.span_s for played in rounds), 2
        ),
        **_percentiles("ttft", [one.ttft_s for one in sent]),
        "ttft_max_s": round(max(one.ttft_s for one in sent), 3),
        "tokens_in_per_token_out": _in_per_out(sent),
        "starved": sum(one.ttft_s > STARVED_S for one in sent),
        "jobs": len(jobs_s),
        "requests": len(sent),
    }
    return found


def by_round(ones: Sequence[Played], others: Sequence[Played]) -> Spread:
    """The median job of one arm over that of another, round by round. The jobs of two rounds are
    not alike, so a median over all of them would depend on the round that it falls into."""
    return ratio_spread([_median(one) for one in ones], [_median(one) for one in others])


def differing(arms: Mapping[str, Sequence[Played]]) -> list[str]:
    """The agents whose last answer is not the same in all arms."""
    found: set[str] = set()
    for same in zip(*arms.values(), strict=True):
        first = same[0].answers
        for other in same[1:]:
            names = first.keys() | other.answers.keys()
            found |= {name for name in names if first.get(name) != other.answers.get(name)}
    return sorted(found)


def _median(played: Played) -> float:
    return statistics.median(played.jobs_s)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles([*values, *values], n=100, method="inclusive")
    return {f"{name}_p50_s": round(cuts[49], 3), f"{name}_p99_s": round(cuts[98], 3)}


def _cached_share(sent: Sequence[Sent]) -> float | None:
    tokens = sum(one.prompt_tokens for one in sent)
    return round(sum(one.cached_tokens for one in sent) / tokens, 3) if tokens else None


def _in_per_out(sent: Sequence[Sent]) -> int | None:
    answered = sum(one.answer_tokens for one in sent)
    return round(sum(one.prompt_tokens for one in sent) / answered) if answered else None


def _read_write(sent: Sequence[Sent]) -> float | None:
    """Tokens read from the cache for each token written to it, answers included."""
    written = sum(one.prompt_tokens - one.cached_tokens + one.answer_tokens for one in sent)
    return round(sum(one.cached_tokens for one in sent) / written, 2) if written else None
