"""What do histories of up to a million tokens cost, stage by stage, and what grows too fast?

Histories of 52K, 250K, 500K and 1M tokens through `/v1/messages`, in the shape of a coding agent's,
each cold and then with warm turns that add a few words. Arms:

    stock   an unmodified SGLang engine without the plugin
    ours    our engine behind the balancer

Both are real engines with a tiny model in which a token attends to itself alone
(`sgl_ext_cpu.own_token`), so attention's quadratic cost is left out and all host work is there.
Both get the same bodies in alternation. For each size and arm: TTFT, the work of each stage until
the answer has ended, and the memory of each process, at its peak and after. `alone` has our stages
without engines, in CPU time, with the memory that each needs. `loop_pause_ms` is the longest pause
of the balancer's event loop while the first body of a size passes.

No stage of ours may grow faster than n^1.3 between two sizes. `tokenize cold` is the tokenizers
library's: its growth is reported, and not judged.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_ext_cpu.node import Node

from bench.lib.arms import running_arms
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.history.alone import TOKENIZER_STAGE, Alone, Stages
from bench.lib.history.growth import exponents, require_near_linear
from bench.lib.history.memory import begin_peak, memory_mib, processes_of
from bench.lib.history.pauses import pauses_ms
from bench.lib.history.work import OUR_STAGES, OUR_SYMBOLS, STOCK_SYMBOLS, work_ms
from bench.lib.pin_load import MESSAGES, Texts
from bench.lib.priority_load import fitted
from bench.lib.script import Size, require, run
from bench.lib.spread import ratio_spread, spread
from bench.lib.warm.load import Answer, Conversation, ask
from bench.lib.warm.stages import FORWARD, Span, Stopwatch

# With overlap the first token of a turn would wait for the second step of the CPU.
_FLAGS = ("--disable-overlap-schedule", "--attention-backend", "sgl_ext_cpu_own_token")
_FIRST_TURNS = 2
_FIRST_TOKENS = 1_500
_ROOM_TOKENS = 20_000
_OF_ENGINES = frozenset(stage for stage in OUR_STAGES if not stage.startswith("balancer"))
# Work that an engine does after its answer has ended.
_AFTER_S = 0.1
_PAUSES = 5


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens, warm turns of each, and rounds of each stage alone."""

    sizes: tuple[int, ...]
    turns: int
    rounds: int


PLANS: dict[Size, Plan] = {
    "full": Plan((52_000, 250_000, 500_000, 1_000_000), 9, 5),
    "quick": Plan((52_000, 250_000, 1_000_000), 5, 2),
    "brief": Plan((52_000, 250_000), 3, 1),
    "smallest": Plan((2_000, 8_000), 2, 1),
}


@dataclass(frozen=True)
class Asked:
    """One request of one arm. turn: 0 is the cold one. mib: of each process."""

    turn: int
    answer: Answer
    end_ns: int
    mib: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class History:
    """One size: its first body, and the requests by arm."""

    body: bytes
    messages: int
    asked: Mapping[str, list[Asked]]


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+")
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.sizes:
        plan = replace(plan, sizes=tuple(options.sizes))
    engines = chosen(options, model_of(options.size, "long"))
    run("long_history", partial(compare, engines, plan))


def compare(engines: Engines, plan: Plan) -> dict[str, Any]:
    """Starts both arms, and returns the figures of every size."""
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        watches = {
            "stock": Stopwatch(folder / "stock", STOCK_SYMBOLS),
            "ours": Stopwatch(folder / "ours", OUR_SYMBOLS),
        }
        starts = {"stock": engines.stock, "ours": engines.ours}
        pool = str(max(plan.sizes) * 11 // 10 + _ROOM_TOKENS)
        nodes = stack.enter_context(
            running_arms(
                {
                    arm: partial(
                        start,
                        folder / f"{arm}-logs",
                        *engines.on_cpu(*_FLAGS, "--max-total-tokens", pool),
                        environment=watches[arm].environment,
                    )
                    for arm, start in starts.items()
                }
            )
        )
        for watch in watches.values():
            watch.spans()  # raises if a function to time is missing
        texts = fitted(nodes["ours"])
        ask_all(nodes, texts, _FIRST_TOKENS, 0)  # what engines do once
        seen = {size: ask_all(nodes, texts, size, plan.turns) for size in plan.sizes}
        spans = {arm: watch.spans() for arm, watch in watches.items()}
    for size, history in seen.items():
        check(size, history)
    alone = Alone(engines.model, plan.rounds)
    pauses = {size: pauses_ms(MESSAGES, history.body, _PAUSES) for size, history in seen.items()}
    return figures(seen, spans, {size: alone.stages(seen[size].body) for size in seen}, pauses)


def ask_all(nodes: Mapping[str, Node], texts: Texts, size: int, turns: int) -> History:
    """One history, cold and then turn by turn, on each node."""
    chat = Conversation(f"history of {size}", texts)
    chat.grow_to(size)
    for node in nodes.values():
        node.flush()
    first = chat.body(MESSAGES)
    messages = len(chat.messages)
    asked: dict[str, list[Asked]] = {arm: [] for arm in nodes}
    for turn in range(1 + _FIRST_TURNS + turns):
        body = chat.body(MESSAGES)
        for arm in list(nodes)[:: 1 if turn % 2 else -1]:
            found = processes_of(nodes[arm].process.pid)
            begin_peak(found)
            answer = ask(nodes[arm], MESSAGES, body)
            time.sleep(_AFTER_S)
            asked[arm].append(Asked(turn, answer, time.monotonic_ns(), memory_mib(found)))
        chat.short_turn()
    return History(first, messages, asked)


def check(size: int, history: History) -> None:
    """Both arms have the same prompts, the first is not cached and the later ones are."""
    tokens = {arm: [one.answer.prompt_tokens for one in row] for arm, row in history.asked.items()}
    require(tokens["ours"] == tokens["stock"], "both arms get the same prompts", **tokens)
    for arm, (cold, *warm) in history.asked.items():
        share = cold.answer.cached_tokens / cold.answer.prompt_tokens
        require(share < 0.2, "the first turn is not cached", size=size, arm=arm, share=share)
        least = min(one.answer.cached_tokens / one.answer.prompt_tokens for one in warm)
        require(least > 0.9, "a later turn is cached", size=size, arm=arm, share=least)


def figures(
    seen: Mapping[int, History],
    spans: Mapping[str, Sequence[Span]],
    alone: Mapping[int, Stages],
    pauses: Mapping[int, Sequence[float]],
) -> dict[str, Any]:
    """All figures; raises InvariantBroken if a stage of ours is not about linear."""
    work = {
        size: {
            arm: [work_ms(spans[arm], one.answer.begin_ns, one.end_ns) for one in row]
            for arm, row in history.asked.items()
        }
        for size, history in seen.items()
    }
    cpu = {
        size: {stage: row["cpu_ms"] for stage, row in stages.items()}
        for size, stages in alone.items()
    }
    ours = {
        # One turn in wall time, so its stages together. The balancer starts a process for its
        # first large body.
        "cold": {
            size: {"engine": sum(_ours(a["ours"][:1], _OF_ENGINES).values())}
            for size, a in work.items()
        },
        "warm": {size: _ours(a["ours"][1 + _FIRST_TURNS :]) for size, a in work.items()},
        "alone": cpu,
    }
    largest = max(seen)
    warm = {arm: row[1 + _FIRST_TURNS :] for arm, row in seen[largest].asked.items()}
    ttft = {arm: [one.answer.ttft_ms for one in row] for arm, row in warm.items()}
    result = {
        "largest_tokens": warm["ours"][-1].answer.prompt_tokens,
        "warm_ttft_ratio_largest": ratio_spread(ttft["stock"], ttft["ours"]),
        "growth": {kind: exponents(by_size) for kind, by_size in ours.items()},
        "sizes": {
            str(size): {
                "body_bytes": len(history.body),
                "messages": history.messages,
                "alone": alone[size],
                "loop_pause_ms": spread(pauses[size]),
                **{arm: _of_arm(history.asked[arm], work[size][arm]) for arm in history.asked},
            }
            for size, history in seen.items()
        },
    }
    for kind, by_size in ours.items():
        judged = {size: without(stages, TOKENIZER_STAGE) for size, stages in by_size.items()}
        require_near_linear(kind, judged)
    return result


def without(stages: Mapping[str, float], name: str) -> dict[str, float]:
    """All stages but this one."""
    return {stage: ms for stage, ms in stages.items() if stage != name}


def _ours(
    turns: Sequence[Mapping[str, float]], stages: Collection[str] = OUR_STAGES
) -> dict[str, float]:
    """The least time of each of these stages."""
    return {stage: min(turn.get(stage, 0.0) for turn in turns) for stage in stages}


def _of_arm(asked: Sequence[Asked], work: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One arm at one size. Host time is all work but the model's forward passes."""
    warm, warm_work = asked[1 + _FIRST_TURNS :], work[1 + _FIRST_TURNS :]
    stages = sorted({stage for turn in warm_work for stage in turn})
    return {
        "prompt_tokens": asked[0].answer.prompt_tokens,
        "cold": {
            "ttft_ms": round(asked[0].answer.ttft_ms, 1),
            "host_ms": round(_host_ms(work[0]), 1),
            "work_ms": {stage: round(ms, 2) for stage, ms in sorted(work[0].items())},
            "mib": asked[0].mib,
        },
        "warm": {
            "ttft_ms": spread([one.answer.ttft_ms for one in warm]),
            "host_ms": spread([_host_ms(turn) for turn in warm_work]),
            "work_ms": {
                stage: round(statistics.median(turn.get(stage, 0.0) for turn in warm_work), 2)
                for stage in stages
            },
            "mib": warm[-1].mib,
        },
    }


def _host_ms(work: Mapping[str, float]) -> float:
    return sum(ms for stage, ms in work.items() if stage != FORWARD)


if __name__ == "__main__":
    main()
