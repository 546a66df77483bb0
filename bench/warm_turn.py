"""How much host time does a turn take whose prefix is cached, stage by stage?

An agent's chat, with tool results of 700 tokens, grows to 4K, 16K, 52K and 128K tokens. At each
size, turns follow that add a few words, through each protocol. Arms:

    stock   an unmodified SGLang engine without the plugin
    ours    our engine behind the balancer

Both get the same bodies, turn by turn in alternation. TTFT is the time from the client's first
byte out to the first byte in of an event with something of the answer; `bench/lib/warm/stages.py`
splits it into stages. Host time is TTFT without the model's forward pass. A round is a turn of both
arms; ratios are of the same round.

Then both arms generate longer answers, one at a time and several at once, in alternation: ours may
not generate over 2% fewer tokens per second than stock in every round.

Then what SGLang does with all messages of a request, for each token and for each request, and chat
templates with the structure of real models' render a chat of 400 messages, in both arms.

Of engines that run already (`--running`), TTFTs of warm turns alone are measured: they write no
spans, and on a GPU kernels run beside the host, so that its stages would say little.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any

import sgl_ext_cpu
from sgl_ext_cpu import front_end
from sgl_ext_cpu.node import Node
from transformers.utils import chat_template_utils

from bench.lib.arms import running_arms
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.pin_load import MESSAGES, Texts
from bench.lib.priority_load import fitted
from bench.lib.script import Size, require, run
from bench.lib.spread import ratio_spread, spread
from bench.lib.warm.bodies import BODIES
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
from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.host_cache.chat_templates import compile_template
from sgl_ext.engine.host_cache.message_cache import Message, SharedMessage
from sgl_ext.engine.http.cache_hooks import count_calls, find_tools
from sgl_ext.engine.sglang_types import Original

# How long chat templates of real models' structure take to render a long chat.
#
# SGLang renders the whole chat in each turn, in Jinja's sandbox. Ours does, too, with quicker code
# (`sgl_ext/engine/host_cache/chat_templates.py`).

_FOLDER = Path(sgl_ext_cpu.__file__).parent
_MESSAGES = 400


def template_sources() -> dict[str, str]:
    """The templates by name: the CPU models' own, and those of other models' structure."""
    files = [_FOLDER / "chat.jinja", *sorted((_FOLDER / "templates").glob("*.jinja"))]
    return {file.stem: file.read_text() for file in files}


def template_times(rounds: int) -> dict[str, dict[str, Any]]:
    """For each template, milliseconds of CPU time by arm, and the ratio with its range."""
    return {name: times_of(source, rounds) for name, source in template_sources().items()}


def compiled(source: str, *, quick: bool) -> Any:
    """A template, compiled as SGLang does it or with our look-ups."""
    compile_whole = unwrap(chat_template_utils._cached_compile_jinja_template)
    return compile_template(compile_whole, source) if quick else compile_whole(source)


def chat(messages: int) -> Mapping[str, Any]:
    """What a template is given for an agent's chat: calls with results, now and then an answer."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "You edit files. " * 100},
        {"role": "user", "content": "Please tidy up this project."},
    ]
    for number in range(messages):
        call = {"name": "Tool3", "arguments": {"path": f"src/module_{number}.py"}}
        called = [{"id": f"call_{number}", "type": "function", "function": call}]
        turns.append({"role": "assistant", "content": "The next file.", "tool_calls": called})
        result = {
            "role": "tool",
            "tool_call_id": f"call_{number}",
            "content": "def f(): pass\n" * 90,
        }
        turns.append(result)
        if number % 10 == 9:
            turns.append({"role": "assistant", "content": "Done."})
            turns.append({"role": "user", "content": "Go on."})
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    functions = [
        {"name": f"Tool{n}", "description": "Edits a file", "parameters": schema} for n in range(20)
    ]
    return {
        "messages": turns[:messages],
        "tools": [{"type": "function", "function": function} for function in functions],
        "documents": None,
        "add_generation_prompt": True,
        "enable_thinking": False,
    }


def times_of(source: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of CPU time of both arms, in turn. Raises RuntimeError if they differ."""
    asked = chat(_MESSAGES)
    arms = {"stock": compiled(source, quick=False), "ours": compiled(source, quick=True)}
    if len({template.render(asked) for template in arms.values()}) != 1:
        raise RuntimeError("the two ways to render a template differ")
    seen: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, template in arms.items():
            begin = time.process_time()
            template.render(asked)
            seen[arm].append((time.process_time() - begin) * 1e3)
    ratios = [stock / ours for stock, ours in zip(seen["stock"], seen["ours"], strict=True)]
    return {
        **{f"{arm}_ms": round(statistics.median(times), 2) for arm, times in seen.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


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


# How many tokens per second both arms generate, one stream at a time and several at once.
#
# The prompt is cached, so that decoding is most of what is measured.

LEAST_OF_STOCK = 0.98
"""Ours generates at least so many of stock's tokens per second."""
_FEWEST_ROUNDS = 3
_PROMPT_TOKENS = 4_000
_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Rate:
    """So many rounds of answers of so many tokens. An answer takes a second or more, so that what
    follows the first token once does not count for much."""

    rounds: int = 7
    answer_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens per second of one arm in one round: of the median stream when several run, of a stream
    alone, and of all streams together."""

    stream: float
    alone: float
    total: float


def measure_rate(nodes: Mapping[str, Node], texts: Texts, rate: Rate) -> dict[str, list[Generated]]:
    """What each node generates in each round, in alternation."""
    chat = Conversation("rate", texts)
    chat.grow_to(min(_PROMPT_TOKENS, 40 * rate.answer_tokens))
    body = chat.body(MESSAGES, rate.answer_tokens)
    for node in nodes.values():
        ask(node, MESSAGES, body)
    seen: dict[str, list[Generated]] = {name: [] for name in nodes}
    for number in range(rate.rounds):
        for name in list(nodes)[:: 1 if number % 2 else -1]:
            seen[name].append(_generate(nodes[name], body))
    return seen


def _generate(node: Node, body: bytes) -> Generated:
    alone = ask(node, MESSAGES, body)
    begun_s = time.monotonic()
    with ThreadPoolExecutor(_STREAMS) as pool:
        answers = list(pool.map(lambda _: ask(node, MESSAGES, body), range(_STREAMS)))
    took_s = time.monotonic() - begun_s
    return Generated(
        statistics.median(answer.tokens_per_s for answer in answers),
        alone.tokens_per_s,
        sum(answer.answer_tokens for answer in answers) / took_s,
    )


def rate_figures(seen: Mapping[str, Sequence[Generated]]) -> dict[str, Any]:
    """Both arms, and ours over stock. Raises InvariantBroken if ours is slower in every round of
    three or more: fewer say too little."""
    result: dict[str, Any] = {"streams": _STREAMS}
    for figure in ("stream", "alone", "total"):
        values = {arm: [getattr(one, figure) for one in rounds] for arm, rounds in seen.items()}
        ratio = ratio_spread(values["ours"], values["stock"])
        require(
            ratio["max"] >= LEAST_OF_STOCK or ratio["rounds"] < _FEWEST_ROUNDS,
            "ours generates as many tokens per second as stock in one round at least",
            figure=figure,
            most=ratio["max"],
        )
        result[figure] = {
            **{arm: spread(each, 1) for arm, each in values.items()},
            "ours_of_stock": ratio,
            "holds": ratio["median"] >= LEAST_OF_STOCK,
        }
    return result


_FIRST_TURNS = 2
_RATE = Rate()
# With overlap, SGLang launches the next step before it has the result of the last one. On a CPU
# the first token of a turn would wait for that second step.
_FLAGS = ("--disable-overlap-schedule",)
# SGLang checks the name in requests of `/v1/responses`.
_NAME = ("--served-model-name", "bench")


@dataclass(frozen=True)
class Plan:
    """Turns of each size and protocol, cold turns, the sizes in tokens, and how answers are
    generated. template_rounds: None: as turns."""

    turns: int
    colds: int
    sizes: tuple[int, ...] = (4_000, 16_000, 52_000, 128_000)
    cold_tokens: int = 16_000
    template_rounds: int | None = None
    rate: Rate = _RATE


PLANS: dict[Size, Plan] = {
    "full": Plan(25, 7),
    "quick": Plan(9, 3),
    "brief": Plan(7, 2, (52_000, 126_000)),
    "smallest": Plan(2, 1, (2_000,), 1_000, rate=Rate(1, 8)),
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
        starts = {"stock": engines.stock, "ours": engines.ours}
        nodes = stack.enter_context(
            running_arms(
                {
                    arm: partial(
                        start,
                        folder / f"{arm}-logs",
                        *(*engines.on_cpu(*_FLAGS), *_NAME),
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
        rates = measure_rate(nodes, texts, plan.rate)
        result = figures(watches, seen, cold)
    rounds = plan.template_rounds or plan.turns
    return {
        **result,
        "tokens_per_s": rate_figures(rates),
        "per_token_ms": per_token_ms(rounds),
        "copies_ms": copies_ms(rounds),
        "templates_of_400_messages": template_times(rounds),
    }


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
        if slope := _slope_ratio(path, split):
            found["slope_ratio"] = slope
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
        "text_ratio": of_turns(lambda turn: turn.get(TOKENIZE, 0.0) + turn.get(TEMPLATE, 0.0)),
        "ttft_ratio": ratio_spread(
            [answer.ttft_ms for answer in arms["stock"]],
            [answer.ttft_ms for answer in arms["ours"]],
        ),
    }


def _slope_ratio(path: str, split: Split) -> float | None:
    """How host time rises from 16K to 128K tokens, ours over stock; None without these sizes."""
    if not split.keys() >= {(path, 16_000), (path, 128_000)}:
        return None

    def host(arm: str, size: int) -> float:
        return statistics.median(host_ms(turn) for turn in split[path, size][arm])

    ours, stock = (host(arm, 128_000) - host(arm, 16_000) for arm in ("ours", "stock"))
    return round(ours / stock, 3)


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
