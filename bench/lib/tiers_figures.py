"""The figures of a run of bench/tiers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.lib.pin_figures import waited
from bench.lib.pin_load import Answer, Flooded
from bench.lib.spread import percentiles_ms, ratio_spread, spread

RELEASE, HICACHE, TIERS = "ours", "stock_hicache", "ours_tiers"
"""The arms that are compared: ours without tiers releases a pin under pressure."""


@dataclass
class Round:
    """One arm's share of a round: the agents who returned, and the unpinned prompts before each.

    span_s: of all of it, without the pauses.
    """

    returns: list[Answer] = field(default_factory=list)
    unpinned: list[Flooded] = field(default_factory=list)
    span_s: float = 0.0

    @property
    def ttft_ms(self) -> list[float]:
        """Of the agents' turns."""
        return [answer.ttft_ms for answer in self.returns]

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that were answered a second, of agents and of unpinned work."""
        unpinned = sum(flooded.tokens for flooded in self.unpinned)
        return (unpinned + sum(answer.prompt_tokens for answer in self.returns)) / self.span_s

    @property
    def unpinned_per_s(self) -> float:
        """The unpinned work's tokens, a second of the time that it took."""
        tokens = sum(flooded.tokens for flooded in self.unpinned)
        return tokens / sum(flooded.span_s for flooded in self.unpinned)


@dataclass
class Seen:
    """What one arm measured.

    turns: of each agent, the first one included. probes: TTFTs in milliseconds.
    """

    turns: list[list[Answer]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """All answers but those of probes."""
        unpinned = [one for played in self.rounds for one in played.unpinned]
        return [
            *(answer for turns in self.turns for answer in turns),
            *(answer for flooded in unpinned for answer in flooded.answers),
        ]


def cached_share(turns: Sequence[Sequence[Answer]], left: Sequence[Sequence[int]]) -> float:
    """The share of what each turn of each agent left marked that the agent's next turn found
    cached. left: the tokens that each turn left, by agent."""
    pairs = [
        (min(turn.cached_tokens, had), had)
        for agent, marked in zip(turns, left, strict=True)
        for turn, had in zip(agent[1:], marked, strict=False)
    ]
    return sum(found for found, _ in pairs) / sum(had for _, had in pairs)


def arm_figures(seen: Seen, left: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One arm's figures. TTFTs of agents are of their returns alone."""
    unpinned = [
        answer.ttft_ms
        for played in seen.rounds
        for flooded in played.unpinned
        for answer in flooded.answers
    ]
    ttft = [value for played in seen.rounds for value in played.ttft_ms]
    return {
        "cached_share": round(cached_share(seen.turns, left), 4),
        **percentiles_ms("ttft", ttft),
        "ttft_mean_ms": round(statistics.mean(ttft), 1),
        "tokens_per_s": spread([played.tokens_per_s for played in seen.rounds], 0),
        **percentiles_ms("unpinned_ttft", unpinned),
        "unpinned_tokens_per_s": spread([played.unpinned_per_s for played in seen.rounds], 0),
    }


def wrong_answers(ones: Sequence[Answer], others: Sequence[Answer]) -> int:
    """How many answers have another text than those to the same prompts."""
    return sum(one.text != other.text for one, other in zip(ones, others, strict=True))


def comparison(seen: Mapping[str, Seen], left: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The arm with tiers against the others: ratios of its rounds to theirs."""
    p50, mean = (
        {name: [middle(played.ttft_ms) for played in arm.rounds] for name, arm in seen.items()}
        for middle in (statistics.median, statistics.mean)
    )
    unpinned = {name: [r.unpinned_per_s for r in arm.rounds] for name, arm in seen.items()}
    answers = {name: arm.answers for name, arm in seen.items()}
    return {
        "pinned_cached_share": round(cached_share(seen[TIERS].turns, left), 4),
        "ttft_p50_vs_hicache": ratio_spread(p50[TIERS], p50[HICACHE]),
        "ttft_p50_vs_release": ratio_spread(p50[TIERS], p50[RELEASE]),
        "ttft_mean_vs_hicache": ratio_spread(mean[TIERS], mean[HICACHE]),
        "ttft_mean_vs_release": ratio_spread(mean[TIERS], mean[RELEASE]),
        "unpinned_throughput_ratio": ratio_spread(unpinned[TIERS], unpinned[HICACHE]),
        "waited_on_pin": waited(seen[TIERS].probes, seen[HICACHE].probes),
        "probe_ttft_ratio": ratio_spread(seen[TIERS].probes, seen[HICACHE].probes),
        "wrong_answers": sum(wrong_answers(each, answers["stock"]) for each in answers.values()),
    }
