"""One fault after another on a node under load, and what became of the requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from bench.agents.client import send
from bench.agents.conversations import Turn
from bench.agents.mixed_load import Sent, judge
from bench.agents.oracle import Oracle
from bench.faults.effect import Effect, Scene
from bench.lib.script import require

Fault = Callable[[Scene], AbstractAsyncContextManager[Effect]]
_RECOVERS_S = 120.0
_AGREE_S = 10.0
_LOOK_S = 0.1
_LIMIT_S = 60.0
_AT_ONCE = 4
_SHOWN = 3
# The load must not delay what shows that the node is back.
_FIRST = {"x-sgl-ext-priority": "100"}


async def strike(scene: Scene, name: str, fault: Fault, oracle: Oracle) -> dict[str, Any]:
    """Does a fault to the node, waits until it has recovered, compares its answers with the
    oracle's, and returns the figures. Raises InvariantBroken if the fault did not happen."""
    before = scene.target.processes.all
    begun_s = time.monotonic()
    async with fault(scene) as effect:
        pass
    ended_s = effect.ended_s or time.monotonic()
    left_running = 0
    if effect.ends_node:
        left_running = await asyncio.to_thread(scene.target.restart)
        scene.load.open.set()
    checks: list[Sent] = []
    has_recovered = await _recover(scene, oracle, checks)
    recovered_s = time.monotonic()
    after = set(scene.target.processes.all)
    died = [] if effect.ends_node else [
        called for process, called in before.items()
        if process not in after and process not in effect.deaths
    ]  # fmt: skip
    agree = await _rest(scene)
    await _check(scene, oracle, oracle.last_turns, checks)
    scene.load.open.set()
    seen = [s for s in scene.load.sent if s.outcome is None or s.reply.ended_s >= effect.struck_s]
    # A request that outlives its fault for long is counted with it, not with the next one.
    seen = [s for s in seen if s.outcome is not None or s.reply.sent_s < recovered_s]
    require(len(seen) > 0, "load is in flight at the fault", fault=name)
    return {
        "fault": name,
        **figures(effect, seen, checks),
        "recovery_s": round(recovered_s - ended_s, 1) if has_recovered and agree else None,
        "unexpected_deaths": died,
        "left_running": left_running,
        "metrics_agree": agree,
        "span_s": round(time.monotonic() - begun_s, 1),
        **effect.notes,
    }


def figures(effect: Effect, seen: Sequence[Sent], checks: Sequence[Sent]) -> dict[str, Any]:
    """What became of the load's requests that a fault met, and of the checks after it."""
    own = [s for s in seen if effect.dies_with(s) and s.outcome in ("lost", "refused", "torn")]
    judged = [s for s in [*seen, *checks] if s not in own]
    now_s = time.monotonic()
    hung = [
        s for s in judged
        if s.outcome in ("whole", "told", None) and s.waited_s(now_s) > effect.hung_after_s
    ]  # fmt: skip
    lost = [s for s in judged if s.outcome in ("lost", "refused")] + hung
    torn = [s for s in judged if s.outcome == "torn"]
    wrong = [s for s in judged if s.is_wrong]
    count = Counter(s.outcome for s in judged)
    struck_s = effect.struck_s
    in_flight = [s for s in seen if s.reply.sent_s < struck_s]
    relayed = [s for s in in_flight if (s.reply.first_byte_s or struck_s) < struck_s]
    return {
        "requests": len(seen),
        "in_flight": len(in_flight),
        "relaying": len(relayed),
        "lost_before_first_byte": len(lost),
        "hung": len(hung),
        "cut_told": count["told"],
        "torn": len(torn),
        "died_with_process": len(own),
        "wrong_answers": len(wrong),
        "checked": len(checks),
        "not_stored": count["forgotten"],
        "longest_wait_s": round(max(s.waited_s(now_s) for s in judged), 1) if judged else 0.0,
        "examples": [*map(_shown, (lost + torn + wrong)[:_SHOWN])],
    }


def _shown(sent: Sent) -> str:
    reply = sent.reply
    end = reply.failure or reply.body[-200:].decode(errors="replace")
    return f"{sent.turn.name}: {sent.outcome}, {reply.status}, {sent.is_wrong=}, {end}"


async def _recover(scene: Scene, oracle: Oracle, checks: list[Sent]) -> bool:
    """Waits until the node is whole and gives a right answer; false if it does not."""
    deadline = time.monotonic() + _RECOVERS_S
    while time.monotonic() < deadline:
        if await scene.target.is_whole(scene.http):
            await _check(scene, oracle, oracle.last_turns[:1], checks)
            return checks[-1].outcome == "whole"
        await asyncio.sleep(_LOOK_S)
    return False


async def _rest(scene: Scene) -> bool:
    """Holds the load back, and waits until the balancer's processes report the same counts."""
    scene.load.open.clear()
    await scene.load.at_rest(_LIMIT_S)
    deadline = time.monotonic() + _AGREE_S
    while time.monotonic() < deadline:
        if await scene.target.pages_agree(scene.http):
            return True
        await asyncio.sleep(1)
    return False


async def _check(scene: Scene, oracle: Oracle, turns: Sequence[Turn], checks: list[Sent]) -> None:
    """Asks for the right answers, some at once."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(turn: Turn) -> None:
        async with slots:
            sent = Sent(turn, scene.target.url, continues=False)
            checks.append(sent)
            await send(sent.reply, sent.url, turn.path, turn.marked, _FIRST, _LIMIT_S)
            judge(sent, oracle)

    await asyncio.gather(*map(ask, turns))
