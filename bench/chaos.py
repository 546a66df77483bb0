"""Does a node lose, tear or falsify an answer when its parts fail?

Two real engines behind two balancer processes, started by the launcher. Agents with growing
histories send through `/v1/messages`, `/v1/chat/completions` and `/v1/responses`, with cache
marks, priorities, streams and disconnects (bench/agents/mixed_load.py), more than the engines'
memory and slots hold. Under this load each fault happens in turn:

    engine_killed, scheduler_killed, detokenizer_killed     kill -9 of one process of an engine
    balancer_process_killed                                 kill -9 of one balancer process
    scheduler_stopped                                       SIGSTOP, and SIGCONT later
    flushed                                                 /flush_cache of both engines
    log_full, store_full, tmp_full                          a full disk under each
    store_locked                                            another program locks the SQLite file
    feed_cut                                                no prefix events reach the balancer
    launcher_killed, sighup, sigterm                        the node ends, and is started again

After each fault the node must be whole again, and answer a fixed set of prompts as a stock
SGLang engine did at temperature 0. The load's own answers are compared, too. `--shape` and
`--trace` give the agents the texts and lengths of a trace. Per fault:

    lost_before_first_byte   requests that failed though no byte of their answer was sent and a
                             well engine was there, or waited longer than a hang may take (hung)
    cut_told                 answers that were cut, and ended in their protocol's error
    torn                     answers that were cut without one
    died_with_process        requests that could not outlive the killed process that had them
    recovery_s               from the fault's end until the node is whole and answers; null: never,
                             or a balancer process no longer reports (metrics_agree)
    wrong_answers            answers that differ from the stock engine's
    unexpected_deaths        processes that ended though the fault did not end them
    left_running             processes that outlived their launcher
    metrics_agree            whether all balancer processes report the same counts afterwards
    not_stored               turns whose stored history was missing; the client sent it again
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from bench.agents.mixed_load import MixedLoad
from bench.faults import ending, engines_kept, filling, killing
from bench.faults.effect import Scene
from bench.faults.stage import TRACE, Stage, set_up
from bench.faults.trial import Fault, strike
from bench.lib.script import Size, parser_of, require, run
from bench.trace.options import add_trace_options, trace_of

FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        # The first, for a budget of retries would be small at the start.
        *(killing.engine_killed, engines_kept.flushed, filling.store_full, filling.store_locked),
        *(killing.balancer_process_killed, filling.log_full, filling.tmp_full),
        *(killing.scheduler_killed, engines_kept.feed_cut, killing.scheduler_stopped),
        *(killing.detokenizer_killed, ending.launcher_killed, ending.sighup, ending.sigterm),
    )
}
_LIMIT_S = 150.0
_SUMS = ("wrong_answers", "lost_before_first_byte", "cut_told", "torn")


@dataclass(frozen=True)
class Plan:
    """How much of everything. hold_s, stop_s: how long a fault lasts, and a stopped process."""

    rounds: int = 3
    agents: int = 12
    turns: int = 6
    hold_s: float = 15
    stop_s: float = 110
    between_s: float = 10
    faults: Sequence[str] = tuple(FAULTS)


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(1, 12, 5, 6, 110, 3),
    "smallest": Plan(1, 8, 2, 2, 2, 0, ("store_locked", "balancer_process_killed")),
}


async def measure(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Does all faults to a running node, and returns the figures."""
    found: list[dict[str, Any]] = []
    preempted = counted = 0.0
    target, oracle = stage.target, stage.oracle
    load = MixedLoad(target.url, oracle, stage.agents, limit_s=_LIMIT_S)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        scene = Scene(target, load, http, plan.hold_s, plan.stop_s)
        loading = asyncio.create_task(load.run())
        for number in range(plan.rounds):
            for name in plan.faults:
                await asyncio.sleep(plan.between_s)
                before = await target.preemptions(http)
                preempted += max(0.0, before - counted)
                counted = before
                found.append(await strike(scene, name, FAULTS[name], oracle))
                print(json.dumps({"round": number, **found[-1]}), flush=True)
                if found[-1]["recovery_s"] is None:
                    await asyncio.to_thread(target.restart)
        load.end()
        await loading
    require(len(load.sent) > 0, "the load is answered")
    return {
        **{name: sum(each[name] for each in found) for name in _SUMS},
        "torn_untold": sum(each["torn"] for each in found),
        "not_recovered": [each["fault"] for each in found if each["recovery_s"] is None],
        "unexpected_deaths": sum(len(each["unexpected_deaths"]) for each in found),
        "requests": len(load.sent),
        "preempted": preempted,
        "faults": found,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], help="only these")
    add_trace_options(parser)
    options = parser.parse_args()
    plan, trace = PLANS[options.size], trace_of(parser, options, TRACE)
    if options.faults:
        plan = replace(plan, faults=options.faults)
    with ExitStack() as stack:
        stage = set_up(stack, plan.agents, plan.turns, trace)
        run("chaos", lambda: asyncio.run(measure(stage, plan)))


if __name__ == "__main__":
    main()
