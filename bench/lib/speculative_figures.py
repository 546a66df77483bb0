"""The figures of a run of bench/speculative_prefill."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.lib.pin_load import Answer
from bench.lib.speculative_load import Round, Turn
from bench.lib.spread import percentiles_ms, ratio_spread, spread

COMPUTED, _USED = "prefilled_ahead_tokens_total", "prefilled_ahead_tokens_used_total"

Rounds = Sequence[Round]


def later(rounds: Rounds) -> list[Turn]:
    """The turns that are answered whole and follow another turn."""
    return [turn for one in rounds for turn in one.turns if turn.number > 1 and turn.seen.is_whole]


def cached_share(turn: Turn) -> float:
    """The cached share of the part of a turn's prompt that was known before it came."""
    return min(turn.seen.cached_tokens, turn.certain_tokens) / turn.certain_tokens


def counted(rounds: Rounds) -> dict[str, float]:
    """The engine's counters over all rounds, without those that did not change."""
    total: Counter[str] = Counter()
    for one in rounds:
        total.update(one.counted)
    return {name: value for name, value in sorted(total.items()) if value}


def arm_figures(rounds: Rounds) -> dict[str, Any]:
    """One arm's figures."""
    turns = later(rounds)
    shares = sorted(map(cached_share, turns))
    first = [turn.seen.ttft_ms for one in rounds for turn in one.turns if turn.number == 1]
    results = [answer.ttft_ms for one in rounds for answer in one.results if answer.is_whole]
    warm_ups = [answer for one in rounds for answer in one.warm_ups]
    cold = [turn.certain_tokens - turn.seen.cached_tokens for turn in turns]
    return {
        **percentiles_ms("ttft", [turn.seen.ttft_ms for turn in turns]),
        "first_ttft_p50_ms": round(statistics.median(first), 1),
        **percentiles_ms("result_ttft", results),
        "cached_share_p50": round(statistics.median(shares), 4),
        "cached_share_p10": round(statistics.quantiles(shares, n=10, method="inclusive")[0], 4),
        "cold_tokens_p50": round(statistics.median(max(tokens, 0) for tokens in cold)),
        **percentiles_ms("others_ttft", _waits_ms(rounds)),
        "others_per_s": spread([others_per_s(one) for one in rounds], 2),
        "tokens_per_s": spread([tokens_per_s(one) for one in rounds], 1),
        "warm_ups": len(warm_ups),
        "warm_up_tokens": sum(one.prompt_tokens - one.cached_tokens for one in warm_ups),
        "failed": sum(map(failed, rounds)),
        "counters": counted(rounds),
    }


def failed(one: Round) -> int:
    """How many requests of a round were not answered whole."""
    answers: list[Answer] = [*(turn.seen for turn in one.turns), *one.results, *one.warm_ups]
    return sum(not answer.is_whole for answer in answers) + sum(map(math.isinf, one.others_ms))


def others_per_s(one: Round) -> float:
    """The unrelated requests that were answered, by the time that people talked."""
    return sum(map(math.isfinite, one.others_ms)) / one.span_s


def tokens_per_s(one: Round) -> float:
    """The tokens that people were answered with, by the time that they talked."""
    answers = [*(turn.seen for turn in one.turns), *one.results]
    return sum(answer.answer_tokens for answer in answers) / one.span_s


def comparison(seen: Mapping[str, Rounds]) -> dict[str, Any]:
    """Ours against no prefill ahead, and against what a client can do. Rounds are pairs."""
    arms = {name: arm_figures(rounds) for name, rounds in seen.items()}
    middles = {
        name: [statistics.median(turn.seen.ttft_ms for turn in later([one])) for one in rounds]
        for name, rounds in seen.items()
    }
    rates = {name: list(map(others_per_s, rounds)) for name, rounds in seen.items()}
    off, ours, naive = (arms[name] for name in ("off", "ours", "naive"))
    computed, used = (ours["counters"].get(name, 0) for name in (COMPUTED, _USED))
    return {
        "ttft_p50_ratio": ratio_spread(middles["off"], middles["ours"]),
        "ttft_p50_ours_over_off": ratio_spread(middles["ours"], middles["off"]),
        "next_prefix_cached_share": ours["cached_share_p50"],
        "next_prefix_cached_share_p10": ours["cached_share_p10"],
        "others_ttft_p99_ratio": _over(ours, off, "others_ttft_p99_ms"),
        "others_throughput_ratio": ratio_spread(rates["ours"], rates["off"]),
        "prefilled_ahead_tokens": round(computed),
        "wasted_tokens": round(computed - used),
        "naive": {
            "ttft_p50_ratio": ratio_spread(middles["off"], middles["naive"]),
            "next_prefix_cached_share": naive["cached_share_p50"],
            "others_ttft_p99_ratio": _over(naive, off, "others_ttft_p99_ms"),
            "others_throughput_ratio": ratio_spread(rates["naive"], rates["off"]),
            "computed_tokens": naive["warm_up_tokens"],
        },
        "arms": arms,
    }


def _over(one: Mapping[str, float], other: Mapping[str, float], name: str) -> float:
    return round(one[name] / other[name], 3)


def _waits_ms(rounds: Rounds) -> list[float]:
    return [wait for one in rounds for wait in one.others_ms if math.isfinite(wait)]
