"""Sessions that move to another engine of their node: the last part of bench/tiers.

Two nodes have engines with the same host cache. The two engines of `shared` have a tier in common.
A session's first turn goes to one of them, and its next turn to the other, which loads the prefix.
The engine of `apart` has no such tier and has not seen the session: sent the same next turn, it
computes the prefix. One engine works at a time, and the nodes take turns at being the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.arms import rotated
from bench.lib.engines import Engines
from bench.lib.pin_arm import Arm
from bench.lib.pin_load import Answer, Conversation, Texts
from bench.lib.priority_load import fitted
from bench.lib.script import precondition, require
from bench.lib.spread import percentiles_ms, ratio_spread
from bench.lib.tiers_figures import wrong_answers

SHARED, APART = "shared", "apart"
_HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--page-size", "64")
_TIER_BYTES = 1 << 30
# An engine stores pages after it has answered.
_SETTLE_S = 1.0
_FOUND_SHARE = 0.8  # what is not found is the end of a page, and the new turn


@dataclass
class Moved:
    """Turns of sessions that moved, on each node in the same order."""

    shared: list[Answer] = field(default_factory=list)
    apart: list[Answer] = field(default_factory=list)


def starts(
    engines: Engines, folder: Path, *flags: str
) -> dict[str, Callable[[], AbstractContextManager[Node]]]:
    """How to start the nodes. flags: of the engines of both."""
    both = (*_HOST, *flags)
    own = {SHARED: ("--instances", "2", "--shared-tier-bytes", str(_TIER_BYTES)), APART: ()}
    return {name: partial(engines.ours, folder / name, *both, *more) for name, more in own.items()}


async def measure_moves(
    nodes: Mapping[str, Node], sessions: int, tokens: int, *, are_exact: bool
) -> dict[str, Any]:
    """The figures of so many sessions, whose prefixes have so many tokens."""
    texts, moved = fitted(nodes[APART]), Moved()
    sides = {SHARED: moved.shared, APART: moved.apart}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        for number in range(sessions + 1):
            system = texts.fresh(f"Session {number}", tokens)
            for name in rotated(list(sides), number):
                answer = await _move(nodes[name], system, texts, http)
                if number:  # the first requests of an engine are slower than all others
                    sides[name].append(answer)
    check_moves(moved, are_exact=are_exact)
    return moved_figures(moved)


async def _move(node: Node, system: str, texts: Texts, http: aiohttp.ClientSession) -> Answer:
    """A session's second turn, at a node's last engine; its first one was at the engine before."""
    *before, last = (replace(node, url=url, engines=(url,)) for url in node.engines)
    conversation = Conversation(system, texts)
    if before:
        await Arm(before[0], conversation, http, 1).turn()
        await asyncio.sleep(_SETTLE_S)
    else:
        conversation.ask()
    return await Arm(last, conversation, http, 1).turn()


def check_moves(moved: Moved, *, are_exact: bool) -> None:
    """Raises InvariantBroken if the nodes did not answer alike, and NotValid if a session found
    little with a shared tier, or something without one."""
    answers = [*moved.shared, *moved.apart]
    broken = sum(not answer.is_whole for answer in answers)
    require(broken == 0, "every request is answered whole", broken=broken)
    wrong = wrong_answers(moved.shared, moved.apart)
    require(wrong == 0 or not are_exact, "loaded prefixes change no answer", wrong=wrong)
    found = [answer.cached_tokens / answer.prompt_tokens for answer in moved.shared]
    precondition(min(found) >= _FOUND_SHARE, "the tier has what moves", least_share=min(found))
    most = max(answer.cached_tokens / answer.prompt_tokens for answer in moved.apart)
    precondition(most < 1 - _FOUND_SHARE, "without a tier all is computed", most_share=most)


def moved_figures(moved: Moved) -> dict[str, Any]:
    """What a session that moves finds, and how long it waits."""
    loaded, computed = (
        [answer.ttft_ms for answer in answers] for answers in (moved.shared, moved.apart)
    )
    tokens = sum(answer.prompt_tokens for answer in moved.shared)
    return {
        "moved_ttft_vs_recompute": ratio_spread(loaded, computed),
        "moved": {
            "sessions": len(loaded),
            "prompt_tokens": round(tokens / len(loaded)),
            "cached_share": round(sum(a.cached_tokens for a in moved.shared) / tokens, 4),
            "wrong_answers": wrong_answers(moved.shared, moved.apart),
            **percentiles_ms("ttft", loaded),
            **percentiles_ms("computed_ttft", computed),
        },
    }
