"""How much sooner does a person's next turn start if the engine prefills it ahead?

Ten people, and more on a faster engine, talk to agents for five turns each, at the same time. In
a turn the person writes, the model thinks and calls a tool, the tool takes 1.5 to 4.5 s, its
result of 1,300 tokens is sent back, and the model thinks and answers. The person thinks for 1 to
5 s and writes again. The template keeps thinking within a turn and drops it when the person has
written again. So the next prompt differs from the cached one from the turn's first thought on.
Arms:

    off     the client marks no request
    ours    it marks each with `nvext.agent_hints.speculative_prefill`
    naive   after each answer it sends the part of the next turn that it knows, as any client
            can: the messages, without tools, for one token

All arms use the same engine. In `off` and `naive`, requests forbid the engine to prefill ahead
unmarked. A round is each arm, in an order that rotates, with an empty cache: the same texts,
sizes and pauses, except for one word. The model's output follows a grammar
(`bench.lib.voice`). Other clients send short prompts, one at a time with pauses, so
the engine is idle now and then.

TTFTs are of the requests with which a person writes, from the second turn on. The part of such
a prompt before the new message is known while the person thinks. `next_prefix_cached_share` is
how much of that part was cached when the request came (median), and `_p10` the 10th percentile.
Without prefill most of a long conversation is cached too; `cold_tokens_p50` is the rest.

`ttft_p50_ratio` is off / ours: more is better. `ttft_p50_ours_over_off` is its inverse. The
`others_` ratios are ours / off for the other clients' requests: p99 over all rounds, and answers
per second. All ratios but that p99 are of rounds. `wasted_tokens` were computed ahead and used by
no next turn, by the engine's count; they include what is prefilled after a person's last turn.
`naive` has the same figures for that arm, against off.
`tokens_per_s_ratio` is ours over stock SGLang while requests do nothing but decode.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import requests
from sgl_ext_cpu.node import Node

from bench.lib.capacity import Capacity, measured
from bench.lib.clients import CHAT, Answer, ask, clients
from bench.lib.engines import OURS, STOCK, chosen, engine_parser, rotated
from bench.lib.generate import Request
from bench.lib.generate import ask as ask_generate
from bench.lib.script import Size, precondition, require, run
from bench.lib.spread import percentiles_ms, ratio_spread, spread
from bench.lib.texts import Texts, fitted
from bench.lib.throughput import compared
from bench.lib.voice import Voice

FLAGS = ("--tool-call-parser", "pythonic")
_PREFIX = "sgl_ext_"
_COUNTED = (f"{_PREFIX}prefill", f"{_PREFIX}next_turns")
COMPUTED, _USED = "prefilled_ahead_tokens_total", "prefilled_ahead_tokens_used_total"
_MOST_ANSWER_TOKENS = 200
_BUSY_SHARE = 0.12
_TOOL = {
    "type": "function",
    "function": {
        "name": "next",
        "description": "Returns the next file of the project, from its first line to its last.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class Arm:
    """What a person's client does for the next turn.

    is_asked: it asks the engine to prefill that. is_warmed: it sends what it can know of it
    itself: without the tools, for one token, as important as any request.
    """

    is_asked: bool = False
    is_warmed: bool = False


ARMS = {"off": Arm(), "ours": Arm(is_asked=True), "naive": Arm(is_warmed=True)}


@dataclass(frozen=True)
class Load:
    """How much of everything. Sizes are in tokens, times in seconds.

    pause_s: how long a person thinks about an answer, from and to. tool_s: how long the tool
    takes.
    start_s: within which all begin. others_pause_s: between an answer and the next request.
    """

    people: int = 10
    turns: int = 5
    system: int = 300
    first: int = 100
    later: int = 30
    result: int = 1400
    pause_s: tuple[float, float] = (1.0, 5.0)
    tool_s: tuple[float, float] = (1.5, 4.5)
    start_s: float = 2.0
    others: int = 2
    others_prompt: int = 150
    others_answer: int = 2
    others_pause_s: float = 0.5
    most_people: int = 40

    def people_for(self, capacity: Capacity) -> int:
        """How many people take so fast an engine a part of its time, and half of its memory at
        most; the load's at least."""
        turn_s = sum((*self.pause_s, *self.tool_s)) / 2
        # A tool's result is computed when it comes, and again in the next turn, without thinking.
        turn_tokens = 2 * self.result + self.later
        busy = _BUSY_SHARE * capacity.prefill_per_s * turn_s / turn_tokens
        said = self.system + self.first + self.turns * (self.result + self.later)
        return max(self.people, round(min(busy, capacity.pool_tokens / 2 / said, self.most_people)))


@dataclass(frozen=True)
class Turn:
    """The request with which a person writes. number: from 1.

    certain_tokens: of its prompt, those before the person's new message: what can be known
    while the person thinks about it.
    """

    number: int
    certain_tokens: int
    seen: Answer


@dataclass
class Round:
    """What one arm saw in one round.

    results: of the requests that a tool's result ends. warm_ups: of those that are the
    client's own doing. others_ms: waits of unrelated requests for their first token.
    counted: what the engine's counters rose by.
    """

    turns: list[Turn] = field(default_factory=list)
    results: list[Answer] = field(default_factory=list)
    warm_ups: list[Answer] = field(default_factory=list)
    others_ms: list[float] = field(default_factory=list)
    span_s: float = 0.0
    counted: Mapping[str, float] = field(default_factory=dict)


class Person:
    """A person and their agent, as far as the conversation has come.

    Of the same round and number, all arms have the same texts, but for the arm's name, with
    which the first message begins.
    """

    def __init__(self, load: Load, stage: Stage, arm: str, name: str) -> None:
        self.load = load
        self._texts = stage.texts
        self._voice = stage.voice
        self.arm = ARMS[arm]
        self._name = name
        self._messages = [{"role": "system", "content": stage.texts.fresh("Agent", load.system)}]
        self._opening = f"{arm}. "
        self.chance = random.Random(name)

    def writes(self, number: int) -> tuple[dict[str, Any], str]:
        """The request of a turn's beginning, and what the person writes in it."""
        tokens = self.load.later if number > 1 else self.load.first
        text = self._opening + self._texts.fresh(f"{self._name}, turn {number}", tokens)
        self._opening = ""
        self._messages.append({"role": "user", "content": text})
        return self._body(is_call=True), text

    def reads(self, call: Answer) -> dict[str, Any]:
        """The request that sends back what the tool gave. Raises RuntimeError without a call."""
        if len(call.calls) != 1:
            raise RuntimeError(f"the model did not call the tool but said {call}")
        name = call.calls[0]["id"]
        text = self._texts.fresh(f"{self._name}, file {len(self._messages)}", self.load.result)
        result = {"role": "tool", "tool_call_id": name, "content": text}
        self._messages += [call.message, result]
        return self._body(is_call=False)

    def hears(self, answer: Answer) -> None:
        """The end of a turn."""
        self._messages.append(answer.message)

    def warm_up(self) -> dict[str, Any]:
        """What a client can send by itself, that knows nothing of the engine."""
        body = self._body(is_call=False)
        del body["tools"], body["regex"], body["logit_bias"]
        return body | {"max_tokens": 1}

    def _body(self, *, is_call: bool) -> dict[str, Any]:
        hints = {"agent_hints": {"speculative_prefill": self.arm.is_asked}}
        return {
            "model": "tiny",
            "max_tokens": _MOST_ANSWER_TOKENS,
            "messages": list(self._messages),
            "tools": [_TOOL],
            # SGLang holds a grammar back until a thought has ended, unless there is none.
            "chat_template_kwargs": {"enable_thinking": False},
            "nvext": hints,
            **self._voice.form(is_call=is_call),
        }


@dataclass(frozen=True)
class Stage:
    """Where rounds are played."""

    http: aiohttp.ClientSession
    url: str
    texts: Texts
    voice: Voice

    async def play(self, load: Load, arm: str, name: str) -> Round:
        """All people at once, and the others for as long as one of them talks."""
        seen, started, ended = Round(), time.perf_counter(), asyncio.Event()
        others = asyncio.gather(
            *(
                self._ask_on(load, f"{name}, {arm}, other {n}", seen, ended)
                for n in range(load.others)
            )
        )
        await asyncio.gather(
            *(
                self._talk(Person(load, self, arm, f"{name}, person {n}"), seen)
                for n in range(load.people)
            )
        )
        seen.span_s = time.perf_counter() - started
        ended.set()
        await others
        return seen

    async def _talk(self, person: Person, seen: Round) -> None:
        load, warming = person.load, list[asyncio.Task[Answer]]()
        await asyncio.sleep(person.chance.uniform(0, load.start_s))
        for number in range(1, load.turns + 1):
            body, text = person.writes(number)
            call = await ask(self.http, self.url, CHAT, body)
            certain = call.prompt_tokens - self.voice.own_tokens(text)
            seen.turns.append(Turn(number, certain, call))
            await asyncio.sleep(person.chance.uniform(*load.tool_s))
            answer = await ask(self.http, self.url, CHAT, person.reads(call))
            seen.results.append(answer)
            person.hears(answer)
            if person.arm.is_warmed:
                warm_up = ask(self.http, self.url, CHAT, person.warm_up())
                warming.append(asyncio.create_task(warm_up))
            if number < load.turns:
                await asyncio.sleep(person.chance.uniform(*load.pause_s))
        seen.warm_ups += await asyncio.gather(*warming)

    async def _ask_on(self, load: Load, name: str, seen: Round, ended: asyncio.Event) -> None:
        number = 0
        while not ended.is_set():
            text = self.texts.fresh(f"{name}, {number}", load.others_prompt)
            request = Request(text, load.others_answer)
            answer = await ask_generate(self.http, self.url, request, time.perf_counter())
            seen.others_ms.append(answer.wait_s * 1000)
            number += 1
            await asyncio.sleep(load.others_pause_s)


Rounds = Sequence[Round]


def later(rounds: Rounds) -> list[Turn]:
    """The turns that are answered whole and follow another turn."""
    return [turn for one in rounds for turn in one.turns if turn.number > 1 and turn.seen.is_whole]


def cached_share(turn: Turn) -> float:
    """The cached share of the part of a turn's prompt that was known before it came."""
    return min(turn.seen.cached_tokens, turn.certain_tokens) / turn.certain_tokens


def counted(rounds: Rounds) -> dict[str, float]:
    """The engine's counters over all rounds, without those that did not change."""
    total: Counter[str] = Counter()
    for one in rounds:
        total.update(one.counted)
    return {name: value for name, value in sorted(total.items()) if value}


def arm_figures(rounds: Rounds) -> dict[str, Any]:
    """One arm's figures."""
    turns = later(rounds)
    shares = sorted(map(cached_share, turns))
    first = [turn.seen.ttft_ms for one in rounds for turn in one.turns if turn.number == 1]
    results = [answer.ttft_ms for one in rounds for answer in one.results if answer.is_whole]
    warm_ups = [answer for one in rounds for answer in one.warm_ups]
    cold = [turn.certain_tokens - turn.seen.cached_tokens for turn in turns]
    return {
        **percentiles_ms("ttft", [turn.seen.ttft_ms for turn in turns]),
        "first_ttft_p50_ms": round(statistics.median(first), 1),
        **percentiles_ms("result_ttft", results),
        "cached_share_p50": round(statistics.median(shares), 4),
        "cached_share_p10": round(statistics.quantiles(shares, n=10, method="inclusive")[0], 4),
        "cold_tokens_p50": round(statistics.median(max(tokens, 0) for tokens in cold)),
        **percentiles_ms("others_ttft", _waits_ms(rounds)),
        "others_per_s": spread([others_per_s(one) for one in rounds], 2),
        "tokens_per_s": spread([tokens_per_s(one) for one in rounds], 1),
        "warm_ups": len(warm_ups),
        "warm_up_tokens": sum(one.prompt_tokens - one.cached_tokens for one in warm_ups),
        "failed": sum(map(failed, rounds)),
        "counters": counted(rounds),
    }


def failed(one: Round) -> int:
    """How many requests of a round were not answered whole."""
    answers: list[Answer] = [*(turn.seen for turn in one.turns), *one.results, *one.warm_ups]
    return sum(not answer.is_whole for answer in answers) + sum(map(math.isinf, one.others_ms))


def others_per_s(one: Round) -> float:
    """The unrelated requests that were answered, by the time that people talked."""
    return sum(map(math.isfinite, one.others_ms)) / one.span_s


def tokens_per_s(one: Round) -> float:
    """The tokens that people were answered with, by the time that they talked."""
    answers = [*(turn.seen for turn in one.turns), *one.results]
    return sum(answer.answer_tokens for answer in answers) / one.span_s


def comparison(seen: Mapping[str, Rounds]) -> dict[str, Any]:
    """Ours against no prefill ahead, and against what a client can do. Rounds are pairs."""
    arms = {name: arm_figures(rounds) for name, rounds in seen.items()}
    middles = {
        name: [statistics.median(turn.seen.ttft_ms for turn in later([one])) for one in rounds]
        for name, rounds in seen.items()
    }
    rates = {name: list(map(others_per_s, rounds)) for name, rounds in seen.items()}
    off, ours, naive = (arms[name] for name in ("off", "ours", "naive"))
    computed, used = (ours["counters"].get(name, 0) for name in (COMPUTED, _USED))
    return {
        "ttft_p50_ratio": ratio_spread(middles["off"], middles["ours"]),
        "ttft_p50_ours_over_off": ratio_spread(middles["ours"], middles["off"]),
        "next_prefix_cached_share": ours["cached_share_p50"],
        "next_prefix_cached_share_p10": ours["cached_share_p10"],
        "others_ttft_p99_ratio": _over(ours, off, "others_ttft_p99_ms"),
        "others_throughput_ratio": ratio_spread(rates["ours"], rates["off"]),
        "prefilled_ahead_tokens": round(computed),
        "wasted_tokens": round(computed - used),
        "naive": {
            "ttft_p50_ratio": ratio_spread(middles["off"], middles["naive"]),
            "next_prefix_cached_share": naive["cached_share_p50"],
            "others_ttft_p99_ratio": _over(naive, off, "others_ttft_p99_ms"),
            "others_throughput_ratio": ratio_spread(rates["naive"], rates["off"]),
            "computed_tokens": naive["warm_up_tokens"],
        },
        "arms": arms,
    }


def _over(one: Mapping[str, float], other: Mapping[str, float], name: str) -> float:
    return round(one[name] / other[name], 3)


def _waits_ms(rounds: Rounds) -> list[float]:
    return [wait for one in rounds for wait in one.others_ms if math.isfinite(wait)]


PLANS: dict[Size, tuple[int, Load]] = {
    "full": (9, Load()),
    "quick": (2, Load()),
    "brief": (1, Load(people=6, turns=3, pause_s=(1.0, 2.0), tool_s=(0.5, 1.0), start_s=1.0)),
    "smallest": (
        1,
        Load(
            people=2,
            turns=2,
            result=300,
            pause_s=(1.0, 1.0),
            tool_s=(0.1, 0.2),
            start_s=0.1,
            most_people=2,
        ),
    ),
}
"""Rounds and their load."""


async def measure(
    nodes: Mapping[str, Node], voice: Voice, load: Load, rounds: int
) -> dict[str, Any]:
    """Runs the arms on our engine, and compares its decoding with stock SGLang's."""
    node = nodes["ours"]
    texts, url = fitted(node), node.engines[0]
    seen: dict[str, list[Round]] = {name: [] for name in ARMS}
    async with clients() as http:
        capacity = await measured(http, nodes["stock"].engines[0], texts)
        urls = {name: each.engines[0] for name, each in nodes.items()}
        decoding = await compared(http, urls, texts, capacity, 2 * rounds + 1)
        load = replace(load, people=load.people_for(capacity))
        stage = Stage(http, url, texts, voice)
        few = Load(people=1, turns=2, pause_s=(0.5, 0.5), tool_s=(0.1, 0.1), start_s=0)
        for name in ARMS:  # warm-up
            await stage.play(few, name, "Warm-up")
        for number in range(rounds):
            for name in rotated(list(ARMS), number):
                node.flush()
                before = counters(url)
                one = await stage.play(load, name, f"Round {number}")
                node.flush()
                one.counted = {k: v - before.get(k, 0) for k, v in counters(url).items()}
                seen[name].append(one)
    found = comparison(seen)
    failed = {name: arm["failed"] for name, arm in found["arms"].items()}
    require(not any(failed.values()), "every request is answered whole", failed=failed)
    ahead = found["prefilled_ahead_tokens"]
    require(ahead > 0, "the engine prefills turns ahead where the client asks for it")
    counted = found["arms"]["off"]["counters"].get(COMPUTED, 0)
    require(counted == 0, "nothing is prefilled ahead where no client asks", tokens=counted)
    cold = found["arms"]["off"]["cold_tokens_p50"]
    precondition(cold > 0, "the next turn has something to prefill ahead", cold_tokens=cold)
    return {"people": load.people, "capacity": capacity.document(), **decoding, **found}


def counters(url: str) -> dict[str, float]:
    """What the engine counts of prefilling ahead, by name and label."""
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith(_COUNTED)]
    return {name.removeprefix(_PREFIX): float(value) for name, value in pairs}


def template_without_switch(model: Path, path: Path) -> Path:
    """The model's template, but for the switch that ends thinking, which has another name.

    SGLang takes the switch of that name in a request to mean that its grammar is not to wait
    for the end of a thought; the model goes on thinking, in words that the grammar leaves it.
    """
    settings = json.loads((model / "tokenizer_config.json").read_text())
    path.write_text(settings["chat_template"].replace("enable_thinking", "lets_think"))
    return path


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    rounds, load = PLANS[options.size]
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tokenizers import Tokenizer  # as local_model: only with an engine

    engines = chosen(options, "tiny")
    voice = Voice(Tokenizer.from_file(str(engines.model / "tokenizer.json")))
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as name:
        folder = Path(name)
        template = template_without_switch(engines.model, folder / "template.jinja")
        flags = (*FLAGS, "--chat-template", str(template))
        with engines.serving({"ours": OURS, "stock": STOCK}, *flags, folder=folder) as nodes:
            run("speculative_prefill", lambda: asyncio.run(measure(nodes, voice, load, rounds)))


if __name__ == "__main__":
    main()
