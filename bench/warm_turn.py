"""How much host time does a turn take whose prefix is cached, stage by stage?

An agent's chat through `/v1/messages`, with tool results of 700 tokens, grows to 4K, 16K, 52K and
128K tokens. At each size, turns follow that add a few words. Arms:

    stock   an unmodified SGLang engine without the plugin
    ours    our engine behind the balancer

Both get the same bodies, turn by turn in alternation. TTFT is the time from the client's first
byte out to its first byte in; `bench/lib/warm/stages.py` splits it into stages. Host time is TTFT
without the model's forward pass. Figures are medians over turns, and so are ratios.

Then chat templates with the structure of real models' render a chat of 400 messages, in both arms.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_ext_cpu.node import Node

from bench.lib.arms import running_arms
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.pin_figures import ratio
from bench.lib.pin_load import Texts
from bench.lib.priority_load import fitted
from bench.lib.script import Size, require, run
from bench.lib.warm.load import Answer, Conversation, ask
from bench.lib.warm.stages import (
    FORWARD,
    OURS,
    SHARED,
    TEMPLATE,
    TOKENIZE,
    Stopwatch,
    medians,
    stages_ms,
)
from bench.lib.warm.templates import template_times

_FIRST_TURNS = 2
# With overlap, SGLang launches the next step before it has the result of the last one. On a CPU
# the first token of a turn would wait for that second step.
_FLAGS = ("--disable-overlap-schedule",)


@dataclass(frozen=True)
class Plan:
    """Turns of each size, cold turns, and the sizes in tokens. template_rounds: None: as turns."""

    turns: int
    colds: int
    sizes: tuple[int, ...] = (4_000, 16_000, 52_000, 128_000)
    cold_tokens: int = 16_000
    template_rounds: int | None = None


PLANS: dict[Size, Plan] = {
    "full": Plan(25, 7),
    "quick": Plan(9, 3),
    "brief": Plan(5, 2, template_rounds=1),
    "smallest": Plan(2, 1, (2_000,), 1_000),
}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+")
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.sizes:
        plan = replace(plan, sizes=tuple(options.sizes))
    engines = chosen(options, model_of(options.size, "bench"))
    run("warm_turn", partial(compare, engines, plan))


def compare(engines: Engines, plan: Plan) -> dict[str, Any]:
    """Starts both arms, and returns the figures of warm and cold turns and of templates."""
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        watches = {
            "stock": Stopwatch(folder / "stock", SHARED),
            "ours": Stopwatch(folder / "ours", SHARED | OURS),
        }
        starts = {"stock": engines.stock, "ours": engines.ours}
        nodes = stack.enter_context(
            running_arms(
                {
                    arm: partial(
                        start,
                        folder / f"{arm}-logs",
                        *engines.on_cpu(*_FLAGS),
                        environment=watches[arm].environment,
                    )
                    for arm, start in starts.items()
                }
            )
        )
        for watch in watches.values():
            watch.spans()  # raises if a function to time is missing
        texts = fitted(nodes["ours"])
        seen = measure(nodes, texts, plan.sizes, plan.turns)
        cold = measure_cold(nodes, texts, plan)
        check(seen, cold)
        result = figures(watches, seen, cold)
    return {
        **result,
        "templates_of_400_messages": template_times(plan.template_rounds or plan.turns),
    }


def check(seen: Turns, cold: Mapping[str, Sequence[Answer]]) -> None:
    """Both arms have the same prompts, warm ones are cached, and cold ones are not."""
    for size, arms in seen.items():
        sizes = {name: [one.prompt_tokens for one in answers] for name, answers in arms.items()}
        require(sizes["ours"] == sizes["stock"], "both arms get the same prompts", **sizes)
        for name, answers in arms.items():
            least = min(one.cached_tokens / one.prompt_tokens for one in answers)
            require(least > 0.8, "a warm turn is cached", size=size, arm=name, share=least)
    for name, turns in cold.items():
        most = max(one.cached_tokens / one.prompt_tokens for one in turns)
        require(most < 0.2, "a cold turn is not cached", arm=name, share=most)


def measure(nodes: Mapping[str, Node], texts: Texts, sizes: Sequence[int], turns: int) -> Turns:
    """Warm turns of each size, on each node."""
    chat = Conversation("warm", texts)
    seen: Turns = {}
    for size in sizes:
        chat.grow_to(size)
        begun = [ask(node, _body(chat)) for node in nodes.values()]
        chat.tokens = begun[0].prompt_tokens
        seen[size] = {name: [] for name in nodes}
        for number in range(_FIRST_TURNS + turns):
            chat.short_turn()
            body = _body(chat)
            for name in list(nodes)[:: 1 if number % 2 else -1]:
                answer = ask(nodes[name], body)
                if number >= _FIRST_TURNS:
                    seen[size][name].append(answer)
    return seen


def measure_cold(nodes: Mapping[str, Node], texts: Texts, plan: Plan) -> dict[str, list[Answer]]:
    """Turns without any cached prefix."""
    seen: dict[str, list[Answer]] = {name: [] for name in nodes}
    for number in range(plan.colds):
        chat = Conversation(f"cold {number}", texts)
        chat.grow_to(plan.cold_tokens)
        for name in list(nodes)[:: 1 if number % 2 else -1]:
            seen[name].append(ask(nodes[name], _body(chat)))
    return seen


def figures(
    watches: Mapping[str, Stopwatch], seen: Turns, cold: Mapping[str, Sequence[Answer]]
) -> dict[str, Any]:
    """Stages of both arms, and ratios of stock over ours."""
    spans = {name: watch.spans() for name, watch in watches.items()}
    split = {
        size: {
            name: [stages_ms(spans[name], a.begin_ns, a.first_ns) for a in answers]
            for name, answers in arms.items()
        }
        for size, arms in seen.items()
    }
    host = {
        size: {name: [host_ms(turn) for turn in turns] for name, turns in arms.items()}
        for size, arms in split.items()
    }
    result: dict[str, Any] = {}
    if 52_000 in seen:
        arms = split[52_000]
        text = {n: [t[TOKENIZE] + t[TEMPLATE] for t in turns] for n, turns in arms.items()}
        ttft = {n: [a.ttft_ms for a in answers] for n, answers in seen[52_000].items()}
        result["tokenize_template_ratio_52k"] = ratio(text["stock"], text["ours"])
        result["host_ratio_52k"] = ratio(host[52_000]["stock"], host[52_000]["ours"])
        result["ttft_ratio_52k"] = ratio(ttft["stock"], ttft["ours"])
    result["cold_ratio"] = ratio(
        [a.ttft_ms for a in cold["ours"]], [a.ttft_ms for a in cold["stock"]]
    )
    if 16_000 in seen and 128_000 in seen:
        rise = {
            n: statistics.median(host[128_000][n]) - statistics.median(host[16_000][n])
            for n in watches
        }
        result["slope_ratio"] = round(rise["ours"] / rise["stock"], 3)
    result["sizes"] = {
        str(size): {name: arm_figures(seen[size][name], split[size][name]) for name in watches}
        for size in seen
    }
    return result


def arm_figures(answers: Sequence[Answer], turns: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One arm at one size, in milliseconds."""
    return {
        "prompt_tokens": answers[-1].prompt_tokens,
        "new_tokens": answers[-1].prompt_tokens - answers[-1].cached_tokens,
        "ttft_ms": round(statistics.median(answer.ttft_ms for answer in answers), 2),
        "host_ms": round(statistics.median(host_ms(turn) for turn in turns), 2),
        "stages_ms": {name: round(ms, 2) for name, ms in medians(turns).items() if ms >= 0.005},
    }


def host_ms(turn: Mapping[str, float]) -> float:
    """A turn without the model's forward pass."""
    return sum(ms for stage, ms in turn.items() if stage != FORWARD)


def _body(chat: Conversation) -> bytes:
    return json.dumps(chat.body()).encode()


Turns = dict[int, dict[str, list[Answer]]]
"""By size, by arm."""


if __name__ == "__main__":
    main()
