"""Recorded sessions through routers, in front of so many engines in virtual time.

    ours            the balancer's router with its admission queue, and our engines
    sglang_router   cache_aware, as sglang-router and smg have it
    vllm_router     each session stays where it began
    llm_d           as before, until an engine has more than twice the mean of requests under way
    dynamo          the agentic preset of Dynamo's KV router
    lmetric         tokens to prefill times requests under way
    round_robin     each engine in turn

All but ours stand in front of stock engines. Every router is given the header that names the
session, and the routers that need events get them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.recorded.arms import ARMS, Arm
from bench.recorded.one_engine import Played, play
from bench.recorded.replay import Replay
from bench.recorded.sessions import Session
from bench.sim.engine import Engine
from bench.sim.policies import (
    CacheAware,
    DynamoAgentic,
    LMetric,
    RoundRobin,
    Sticky,
    StickyUntilSaturated,
)

OTHERS: dict[str, Callable[[], Any]] = {
    "sglang_router": CacheAware,
    "vllm_router": Sticky,
    "llm_d": StickyUntilSaturated,
    "dynamo": DynamoAgentic,
    "lmetric": LMetric,
    "round_robin": RoundRobin,
}
ROUTERS = ("ours", *OTHERS)
FIGURES = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "cached_share")


def route(
    router: str, sessions: Sequence[Session], engines: int, at_once: int, *, grain: int, seed: int
) -> Played:
    """Plays sessions through one router."""
    run = partial(play, sessions=sessions, at_once=at_once, grain=grain, seed=seed, engines=engines)
    if router == "ours":
        return run(ARMS["ours"])

    def policy(running: Sequence[Engine], replayed: Replay) -> Any:
        return OTHERS[router]()

    return run(Arm(), policy=policy)


def behind(figures: dict[str, dict[str, Any]], margin: float = 0.0) -> list[str]:
    """The arms that are ahead of ours, each with the figure in which: less time to the first token,
    or a larger cached share. margin: what counts as no difference, as a share."""
    ours, found = figures["ours"], []
    for arm, theirs in figures.items():
        for name in FIGURES if arm != "ours" else ():
            mine, other = ours[name], theirs[name]
            if name == "cached_share":
                is_behind = other > mine * (1 + margin)
            else:
                is_behind = other < mine * (1 - margin)
            if is_behind:
                found.append(f"{arm} {name}")
    return found
