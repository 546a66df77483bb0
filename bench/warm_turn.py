"""How much host time does a turn take whose prefix is cached, stage by stage?

An agent's chat, with tool results of 700 tokens, grows to 4K, 16K, 52K and 128K tokens. At each
size, turns follow that add a few words, through each protocol. Arms:

    stock   an unmodified SGLang engine without the plugin
    ours    our engine behind the balancer

Both get the same bodies, turn by turn in alternation. TTFT is the time from the client's first
byte out to the first byte in of an event with something of the answer; `bench/lib/warm/stages.py`
splits it into stages. Host time is TTFT without the model's forward pass. A round is a turn of both
arms; ratios are of the same round.

Then both arms decode, in alternation: `tokens_per_s_ratio` is ours over stock. Then what SGLang
does with all messages of a request, for each token and for each request, in both arms.

Of engines that run already (`--running`), TTFTs of warm turns alone are measured: they write no
spans, and on a GPU kernels run beside the host, so that its stages would say little.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sgl_ext_cpu import front_end
from sgl_ext_cpu.node import Node

from bench.lib.capacity import measured
from bench.lib.clients import MESSAGES, clients
from bench.lib.engines import Arm, Engines, chosen, engine_parser, model_of
from bench.lib.script import Size, require, run
from bench.lib.spread import ratio_spread, spread
from bench.lib.texts import Texts, fitted
from bench.lib.throughput import compared
from bench.lib.warm.bodies import BODIES
from bench.lib.warm.load import Answer, Conversation, ask
from bench.lib.warm.stages import (
    FORWARD,
    OURS,
    SHARED,
    Stopwatch,
    medians,
    stages_ms,
)
from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.host_cache.message_cache import Message, SharedMessage
from sgl_ext.engine.http.cache_hooks import count_calls, find_tools
from sgl_ext.engine.sglang_types import Original

# What SGLang's front end does with all messages of a request, by their number.
#
# For each token of a chat completion whose model can call tools, it looks through them four
# times; ours finds it once. Before it renders them, it copies their dicts twice; ours are quick
# to copy, and cached ones are their own copies.

_COUNTS_OF_MESSAGES = (41, 171, 421, 3301)
_TOOLS = 20
_TIMES = 20
# The calls of `_process_tool_call_stream` and of `_tool_call_parsing_active`, which runs twice.
_LOOKS_FOR_TOOLS = 3


def per_token_ms(rounds: int) -> dict[str, Any]:
    """Milliseconds of CPU time for each token, by the number of messages and by arm."""
    front_end.load()
    module = import_module("sglang.srt.entrypoints.openai.serving_chat")
    chat = object.__new__(module.OpenAIServingChat)
    tools, calls = type(chat)._effective_tools, type(chat)._get_history_tool_calls_cnt
    once, counted = partial(find_tools, tools), partial(count_calls, calls)
    result: dict[str, Any] = {}
    for messages in _COUNTS_OF_MESSAGES:
        request = _request(messages)
        seen: dict[str, list[float]] = {"stock": [], "ours": []}
        for _ in range(rounds):
            seen["stock"].append(_ms(partial(_look, tools, calls, chat, request)))
            with entered(RequestContext()):
                seen["ours"].append(_ms(partial(_look, once, counted, chat, request)))
        result[str(messages)] = {arm: spread(times, 4) for arm, times in seen.items()}
    return result


def copies_ms(rounds: int) -> dict[str, Any]:
    """Milliseconds of CPU time for both copies of a request's dicts, by the number of messages.

    cached: ours for messages of `/v1/messages` that are known.
    """
    front_end.load()
    result: dict[str, Any] = {}
    for messages in _COUNTS_OF_MESSAGES:
        written = [message.model_dump() for message in _request(messages).messages]
        arms: dict[str, list[Any]] = {
            "stock": written,
            "ours": [*map(Message, written)],
            "cached": [*map(SharedMessage, written)],
        }
        seen: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, dicts in arms.items():
                seen[arm].append(2 * _ms(partial(copy.deepcopy, dicts), 1))
        result[str(messages)] = {arm: spread(times, 4) for arm, times in seen.items()}
    return result


def _look(find: Original, count: Original, *given: Any) -> None:
    for _ in range(_LOOKS_FOR_TOOLS):
        find(*given)
    count(*given)


def _ms(work: Callable[[], object], times: int = _TIMES) -> float:
    work()
    begin_s = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begin_s) * 1e3 / times


def _request(messages: int) -> Any:
    protocol = import_module("sglang.srt.entrypoints.openai.protocol")
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Please tidy up this project."}]
    while len(turns) < messages:
        name = f"call_{len(turns)}"
        function = {"name": "Tool3", "arguments": "{}"}
        call = {"id": name, "type": "function", "function": function}
        turns.append({"role": "assistant", "content": "Next.", "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": name, "content": "def f(): pass"})
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": f"Tool{number}", "parameters": schema}}
        for number in range(_TOOLS)
    ]
    return protocol.ChatCompletionRequest(model="bench", messages=turns, tools=tools)


_FIRST_TURNS = 2
# With overlap, SGLang launches the next step before it has the result of the last one. On a CPU
# the first token of a turn would wait for that second step.
_FLAGS = ("--disable-overlap-schedule",)
# SGLang checks the name in requests of `/v1/responses`.
_NAME = ("--served-model-name", "bench")


@dataclass(frozen=True)
class Plan:
    """Turns of each size and protocol, cold turns, and the sizes in tokens."""

    turns: int
    colds: int
    sizes: tuple[int, ...] = (4_000, 16_000, 52_000, 128_000)
    cold_tokens: int = 16_000
    decode_rounds: int = 7


PLANS: dict[Size, Plan] = {
    "full": Plan(25, 7),
    "quick": Plan(9, 3),
    "brief": Plan(7, 2, (52_000, 126_000)),
    "smallest": Plan(2, 1, (2_000,), 1_000, 1),
}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+")
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.sizes:
        plan = replace(plan, sizes=tuple(options.sizes))
    engines = chosen(options, model_of(options.size, "bench"))
    run("warm_turn", partial(compare_running if engines.running else compare, engines, plan))


def compare_running(engines: Engines, plan: Plan) -> dict[str, Any]:
    """The TTFTs of warm turns at engines that run already."""
    nodes = {name: engines.running_node(name) for name in ("stock", "ours")}
    seen = measure(nodes, fitted(nodes["ours"]), plan.sizes, plan.turns)
    check(seen, {})
    found: dict[str, Any] = {}
    for (path, size), arms in seen.items():
        ttft_ms = {name: [one.ttft_ms for one in answers] for name, answers in arms.items()}
        found.setdefault(path, {})[str(size)] = {
            "prompt_tokens": arms["ours"][-1].prompt_tokens,
            "ttft_ratio": ratio_spread(ttft_ms["stock"], ttft_ms["ours"]),
            **{name: {"ttft_ms": spread(each, 2)} for name, each in ttft_ms.items()},
        }
    return found


def compare(engines: Engines, plan: Plan) -> dict[str, Any]:
    """Starts both arms, and returns the figures of warm and cold turns and of templates."""
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        watches = {
            "stock": Stopwatch(folder / "stock", SHARED),
            "ours": Stopwatch(folder / "ours", SHARED | OURS),
        }
        arms = {
            arm: Arm(is_ours=arm == "ours", environment=watch.environment)
            for arm, watch in watches.items()
        }
        flags = (*engines.on_cpu(*_FLAGS), *_NAME)
        nodes = stack.enter_context(engines.serving(arms, *flags, folder=folder / "logs"))
        for watch in watches.values():
            watch.spans()  # raises if a function to time is missing
        texts = fitted(nodes["ours"])
        seen = measure(nodes, texts, plan.sizes, plan.turns)
        cold = measure_cold(nodes, texts, plan)
        check(seen, cold)
        decoding = asyncio.run(decode(nodes, texts, plan.decode_rounds))
        found = figures(watches, seen, cold)
    rounds = {"per_token_ms": per_token_ms(plan.turns), "copies_ms": copies_ms(plan.turns)}
    return {**found, **decoding, **rounds}


async def decode(nodes: Mapping[str, Node], texts: Texts, rounds: int) -> dict[str, Any]:
    """Tokens per second of ours and stock."""
    urls = {name: node.engines[0] for name, node in nodes.items()}
    async with clients() as http:
        capacity = await measured(http, urls["stock"], texts)
        return await compared(http, urls, texts, capacity, rounds)


def check(seen: Turns, cold: Mapping[str, Sequence[Answer]]) -> None:
    """Both arms have the same prompts, warm ones are cached, and cold ones are not."""
    for (path, size), arms in seen.items():
        sizes = {name: [one.prompt_tokens for one in answers] for name, answers in arms.items()}
        require(sizes["ours"] == sizes["stock"], "both arms get the same prompts", **sizes)
        for name, answers in arms.items():
            least = min(one.cached_tokens / one.prompt_tokens for one in answers)
            require(least > 0.8, "a warm turn is cached", path=path, size=size, arm=name, of=least)
    for name, turns in cold.items():
        most = max(one.cached_tokens / one.prompt_tokens for one in turns)
        require(most < 0.2, "a cold turn is not cached", arm=name, share=most)


def measure(nodes: Mapping[str, Node], texts: Texts, sizes: Sequence[int], turns: int) -> Turns:
    """Warm turns of each protocol and size, on each node."""
    chat = Conversation("warm", texts)
    seen: Turns = {}
    for size in sizes:
        chat.grow_to(size)
        for path in BODIES:
            body = chat.body(path)
            begun = [ask(node, path, body) for node in nodes.values()]
            chat.tokens = begun[0].prompt_tokens
            seen[path, size] = {name: [] for name in nodes}
        for number in range(_FIRST_TURNS + turns):
            for path in BODIES:
                chat.short_turn()
                body = chat.body(path)
                for name in list(nodes)[:: 1 if number % 2 else -1]:
                    answer = ask(nodes[name], path, body)
                    if number >= _FIRST_TURNS:
                        seen[path, size][name].append(answer)
    return seen


def measure_cold(nodes: Mapping[str, Node], texts: Texts, plan: Plan) -> dict[str, list[Answer]]:
    """Turns without any cached prefix."""
    seen: dict[str, list[Answer]] = {name: [] for name in nodes}
    for number in range(plan.colds):
        chat = Conversation(f"cold {number}", texts)
        chat.grow_to(plan.cold_tokens)
        for name in list(nodes)[:: 1 if number % 2 else -1]:
            seen[name].append(ask(nodes[name], MESSAGES, chat.body(MESSAGES)))
    return seen


def figures(
    watches: Mapping[str, Stopwatch], seen: Turns, cold: Mapping[str, Sequence[Answer]]
) -> dict[str, Any]:
    """Stages of both arms, and ratios of stock over ours, by protocol and size."""
    spans = {name: watch.spans() for name, watch in watches.items()}
    split: Split = {
        key: {
            name: [stages_ms(spans[name], a.begin_ns, a.first_ns) for a in answers]
            for name, answers in arms.items()
        }
        for key, arms in seen.items()
    }
    cold_ttft = {name: [one.ttft_ms for one in answers] for name, answers in cold.items()}
    result: dict[str, Any] = {"cold_ratio": ratio_spread(cold_ttft["ours"], cold_ttft["stock"])}
    for path in BODIES:
        found: dict[str, Any] = {}
        for (of_path, size), arms in seen.items():
            if of_path == path:
                turns = split[path, size]
                found[str(size)] = {
                    **ratios(arms, turns),
                    **{name: arm_figures(arms[name], turns[name]) for name in watches},
                }
        result[path] = found
    return result


def ratios(
    arms: Mapping[str, Sequence[Answer]], turns: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, Any]:
    """Stock over ours, at one size through one protocol."""

    def of_turns(figure: Callable[[Mapping[str, float]], float]) -> Any:
        return ratio_spread(list(map(figure, turns["stock"])), list(map(figure, turns["ours"])))

    return {
        "host_ratio": of_turns(host_ms),
        "ttft_ratio": ratio_spread(
            [answer.ttft_ms for answer in arms["stock"]],
            [answer.ttft_ms for answer in arms["ours"]],
        ),
    }


def arm_figures(answers: Sequence[Answer], turns: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One arm at one size, in milliseconds. Stages are medians over turns."""
    return {
        "prompt_tokens": answers[-1].prompt_tokens,
        "new_tokens": answers[-1].prompt_tokens - answers[-1].cached_tokens,
        "ttft_ms": spread([answer.ttft_ms for answer in answers], 2),
        "host_ms": spread([host_ms(turn) for turn in turns], 2),
        "stages_ms": {name: round(ms, 2) for name, ms in medians(turns).items() if ms >= 0.005},
    }


def host_ms(turn: Mapping[str, float]) -> float:
    """A turn without the model's forward pass."""
    return sum(ms for stage, ms in turn.items() if stage != FORWARD)


Turns = dict[tuple[str, int], dict[str, list[Answer]]]
"""By path and size, by arm."""
Split = dict[tuple[str, int], dict[str, list[dict[str, float]]]]
"""The same turns, each by stage in milliseconds."""


if __name__ == "__main__":
    main()
