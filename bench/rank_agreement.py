"""Do all ranks of an engine decide alike, in every iteration?

Each arm is one engine of two ranks:

    one_node     --tp-size 2, one main process
    two_nodes    --tp-size 2 --nnodes 2: two main processes that have only the network in common
    pipeline     --pp-size 2, one main process

Each is driven with pins, preemption, interrupted prefills, slices of prefills ahead, clients that
leave, flushes, deleted pins and changed settings (`bench.lib.rank_load`). SGLang's own checks are
on: a rank tells the others what it matches, locks, stores and evicts, and the extension adds its
pins, victims, slices and orders. Ranks that differ end their engine.

`disagreements` counts ranks that found a difference, requests without an answer, and engines that
ended. With one or more, the exit status is 1.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import requests
from sgl_ext_cpu.node import local_model
from sgl_ext_cpu.ranks import Ranks, running_ranks

from bench.lib.rank_load import RankLoad
from bench.lib.script import Size, parser_of, require, run

ARMS: dict[str, dict[str, Any]] = {
    "one_node": {},
    "two_nodes": {"nodes": 2},
    "pipeline": {"pipeline": True},
}
SECONDS: dict[Size, float] = {"full": 300.0, "quick": 8.0, "smallest": 6.0}
_FLAGS = ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
_TIMEOUT_S = 90.0
_ENABLED = "Rank consensus checker is enabled"
_COUNTED = {
    "pins_granted": "sgl_ext_pins_granted_total",
    "pins_ended": "sgl_ext_pins_ended_total",
    "preempted": "sgl_ext_preempted_requests_total",
    "interrupted": "sgl_ext_prefills_interrupted_total",
    "prefilled_ahead_tokens": "sgl_ext_prefilled_ahead_tokens_total",
    "slices_rejected": "sgl_ext_prefill_ahead_slices_rejected_total",
}


async def _drive(ranks: Ranks, seconds: float, seed: int) -> RankLoad:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        load = RankLoad(http, ranks.url, seed)
        await load.drive(seconds)
        return load


def measure_arm(ranks: Ranks, seconds: float, seed: int) -> dict[str, Any]:
    """Drives one engine for so long."""
    started = time.monotonic()
    load = asyncio.run(_drive(ranks, seconds, seed))
    figures = {"seconds": round(time.monotonic() - started, 1), **load.sent}
    text = "".join(log.read_text(errors="replace") for log in ranks.logs)
    require(text.count(_ENABLED) == 2, "both ranks compare what they do")
    if not load.failed:
        figures |= _counted(ranks.url)
        for name in ("pins_granted", "preempted", "prefilled_ahead_tokens"):
            require(figures[name] > 0, "the load has something of each", missing=name, **figures)
    found = ranks.divergences() + sum(load.failed.values())
    if found:
        print(
            "".join(log.read_text(errors="replace")[-6000:] for log in ranks.logs), file=sys.stderr
        )
    return figures | {"disagreements": found, **({"failed": dict(load.failed)} if found else {})}


def _counted(url: str) -> dict[str, int]:
    page = requests.get(f"{url}/metrics", timeout=30).text
    rows = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    counts: Counter[str] = Counter()
    for name, metric in _COUNTED.items():
        counts[name] = sum(round(float(value)) for key, value in rows if key.startswith(metric))
    return dict(counts)


def measure(arms: list[str], seconds: float, seed: int) -> Mapping[str, Any]:
    """The figures of all arms, one after the other."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arms:
            log_dir = Path(folder) / name
            with running_ranks(local_model("tiny"), log_dir, *_FLAGS, **ARMS[name]) as ranks:
                figures[name] = measure_arm(ranks, seconds, seed)
    return {"disagreements": sum(arm["disagreements"] for arm in figures.values()), **figures}


def main() -> None:
    """Prints the figures, and exits with status 1 if ranks have disagreed."""
    parser = parser_of(__doc__)
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="default: all of them")
    parser.add_argument("--seconds", type=float, help="for how long each arm is driven")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = 0

    def measured() -> Mapping[str, Any]:
        nonlocal found
        seconds = given.seconds or SECONDS[given.size]
        arms = ["two_nodes"] if given.size == "smallest" else list(ARMS)
        figures = measure(given.arm or arms, seconds, given.seed)
        found = figures["disagreements"]
        return figures

    run("rank_agreement", measured)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
