"""What do load generators of other projects report about us, stock SGLang and its routers?

Each judge sends the same work to all arms in turn, with emptied caches before each run:

    ours            two engines with the plugin behind our balancer
    stock           two engines of SGLang as it is, requests in turn
    sglang-router   in front of the same two engines, cache-aware (full size)
    smg             the same

Every figure but `engines_cached_share` is the judge's own. That one is from the engines' metrics,
to be held against the judge's `cached_share`. Rates are shares of what stock SGLang answers on
this machine, measured first. An arm that does not serve an endpoint has the reason in its place.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.judges import aiperf, bench_serving, guidellm
from bench.judges.arms import PEERS, Arm, arms_of, capacity_per_s
from bench.judges.judged import Load, Setting
from bench.lib.engines import Engines, chosen, engine_parser
from bench.lib.script import Size, require, run
from bench.lib.spread import ratio_spread, spread

JUDGES = {"aiperf": aiperf.loads, "bench_serving": bench_serving.loads, "guidellm": guidellm.loads}

_ROUNDS: dict[Size, int] = {"full": 5, "quick": 2, "smallest": 1}
_PEERS: dict[Size, tuple[str, ...]] = {"full": PEERS, "quick": (), "smallest": ()}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--judge", nargs="+", choices=JUDGES, help="which judges (default: all)")
    options = parser.parse_args()
    size: Size = options.size
    # The smallest size is for tests, which install no other judge.
    judges = options.judge or (("bench_serving",) if size == "smallest" else tuple(JUDGES))
    run("judges", partial(measure, chosen(options, "tiny"), size, judges))


def measure(engines: Engines, size: Size, judges: tuple[str, ...]) -> dict[str, Any]:
    """Starts the arms and has every judge load them."""
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder:
        scratch = Path(folder)
        with arms_of(engines, scratch / "logs", _PEERS[size]) as arms:
            model = arms["stock"].served_model()
            capacity = capacity_per_s(arms["stock"], model)
            setting = Setting(engines.model, model, size, capacity, scratch)
            figures = {
                judge: {
                    name: compare(load, arms, model, scratch / judge, _ROUNDS[size])
                    for name, load in JUDGES[judge](setting).items()
                }
                for judge in judges
            }
    return {"size": size, "capacity_per_s": round(capacity, 2), **figures}


def compare(
    load: Load, arms: Mapping[str, Arm], model: str, folder: Path, rounds: int
) -> dict[str, Any]:
    """The spread of each figure of each arm, and of ours over stock SGLang's."""
    reasons = {name: arm.refusal(load.endpoint, model) for name, arm in arms.items()}
    serving = [name for name, reason in reasons.items() if not reason]
    values: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in serving}
    for number in range(rounds):
        for name in serving if number % 2 == 0 else serving[::-1]:
            for figure, value in one_run(load, name, arms[name], folder).items():
                values[name][figure].append(value)
            print(f"{folder.name} round {number} {name}: {values[name]}", file=sys.stderr)
    found: dict[str, Any] = {
        name: {figure: spread(each) for figure, each in of.items()} for name, of in values.items()
    }
    found |= {name: {"refused": reason} for name, reason in reasons.items() if reason}
    if {"ours", "stock"} <= values.keys():
        ours, stock = values["ours"]["ttft_ms_p50"], values["stock"]["ttft_ms_p50"]
        found["stock_over_ours_ttft_p50"] = ratio_spread(stock, ours)
    return {"requests": load.requests, **found}


def one_run(load: Load, name: str, arm: Arm, folder: Path) -> dict[str, float]:
    """The judge's figures, and the cached share that the engines' metrics give."""
    arm.flush()
    prompts_before, computed_before = arm.tokens()
    judged = load.run(arm.url, folder)
    prompts, computed = arm.tokens()
    require(not judged.errors, "every request is answered", arm=name, errors=judged.errors)
    require(
        judged.requests == load.requests,
        "a judge sends its whole load",
        arm=name,
        requests=judged.requests,
        load=load.requests,
    )
    had = prompts - prompts_before
    require(had > 0, "engines had prompts", arm=name)
    shares = {"engines_cached_share": 1 - (computed - computed_before) / had}
    return {**judged.figures(), **shares}


if __name__ == "__main__":
    main()
