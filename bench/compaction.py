"""What does it cost an agent when its context is full and its client compacts it?

An agent reads files in a tool loop, with thinking, until its conversation takes most of the memory.
Then its client asks for a summary, as each of these does:

    claude_code   with the same tools; it goes on with the summary, the last call and its result
    codex         without tools; it goes on with the person's message and the summary

The first turn after the compaction is sent at once, and then the next turn of the loop, which is
the warm turn. Arms: our engine, stock SGLang, and stock SGLang with HiCache and its `file` backend.
All arms get the same texts, with an empty cache, in an order that rotates.

`ttft_after_over_warm` is the TTFT of the first turn after the compaction over that of the warm
turn, the median of all rounds of our arm, and the larger of both clients. `cold_tokens` is what the
turn computes, `wait_s` is the time of the summary and the TTFT after it, which is what a person
waits for. Both turns have equal prompts in all arms, and `wrong_answers` counts those whose answer
is another than stock SGLang's.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib import clients
from bench.lib.clients import CHAT, Answer
from bench.lib.engines import OURS, STOCK, Arm, chosen, engine_parser, rotated
from bench.lib.script import Size, require, run
from bench.lib.spread import ratio_spread, spread
from bench.lib.texts import Texts, fitted

CLIENTS = ("claude_code", "codex")
SUM_UP = "Do NOT call any tools. Write a detailed summary of the conversation so far."
_SUMMARY_TOKENS = 48

_Json = dict[str, Any]


class Load(NamedTuple):
    """Sizes in tokens; the memory holds `pool`. files: how many the agent reads."""

    rounds: int
    files: int
    system: int = 2_000
    tools: int = 3_000
    result: int = 1_000
    thought: int = 200
    summary: int = 500
    pool: int = 24_000


LOADS: dict[Size, Load] = {
    "full": Load(9, 10),
    "quick": Load(4, 10),
    "brief": Load(2, 10),
    "smallest": Load(1, 2, 200, 300, 200, 50, 60, 8_192),
}


class Compaction(NamedTuple):
    """What a client saw of one."""

    summary: Answer
    after: Answer
    warm: Answer


class Agent:
    """A conversation of one client, equal in all arms."""

    def __init__(self, texts: Texts, load: Load, client: str, name: str) -> None:
        self._load, self._client, self._texts = load, client, texts
        self._name = f"{name}, {client}"
        parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
        described = self._fresh("tool", load.tools)
        tool = {"name": "read", "description": described, "parameters": parameters}
        self.tools = [{"type": "function", "function": tool}]
        self.opening = [
            {"role": "system", "content": self._fresh("system", load.system)},
            {"role": "user", "content": self._fresh("task", 100)},
        ]
        self._read = 0

    def _fresh(self, what: str, tokens: int) -> str:
        return self._texts.fresh(f"{self._name}, {what}", tokens)

    def reads(self) -> list[_Json]:
        """A thought, a call and its result."""
        self._read += 1
        name = f"call_{self._read}"
        arguments = json.dumps({"path": f"file{self._read}.py"})
        call = {
            "id": name,
            "type": "function",
            "function": {"name": "read", "arguments": arguments},
        }
        return [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": self._fresh(f"thought {name}", self._load.thought),
                "tool_calls": [call],
            },
            {
                "role": "tool",
                "tool_call_id": name,
                "content": self._fresh(f"file {name}", self._load.result),
            },
        ]

    def after(self, messages: list[_Json]) -> list[_Json]:
        """With what the client goes on."""
        summary = self._fresh("summary", self._load.summary)
        goes_on = f"This session is being continued. Summary:\n{summary}"
        if self._client == "codex":
            return [*self.opening, {"role": "user", "content": goes_on}]
        system, task = self.opening
        content = f"{task['content']}\n{goes_on}"
        return [system, {"role": "user", "content": content}, *messages[-2:]]

    def body(self, messages: list[_Json], *, sums_up: bool = False) -> _Json:
        lacks_tools = sums_up and self._client == "codex"
        return {
            "model": "tiny",
            "max_tokens": _SUMMARY_TOKENS if sums_up else 4,
            "ignore_eos": True,
            "messages": messages,
            **({} if lacks_tools else {"tools": self.tools}),
            "prompt_cache_key": self._name,
        }


async def ask(http: aiohttp.ClientSession, url: str, body: _Json) -> Answer:
    answer = await clients.ask(http, url, CHAT, body)
    require(answer.is_whole, "every request is answered whole")
    return answer


async def compact(http: aiohttp.ClientSession, url: str, agent: Agent, load: Load) -> Compaction:
    """An agent's loop up to its compaction, and two turns after it."""
    messages = list(agent.opening)
    for _ in range(load.files):
        messages += agent.reads()
        await ask(http, url, agent.body(messages))
    asked = [*messages, {"role": "user", "content": SUM_UP}]
    summary = await ask(http, url, agent.body(asked, sums_up=True))
    goes_on = agent.after(messages)
    after = await ask(http, url, agent.body(goes_on))
    warm = await ask(http, url, agent.body([*goes_on, *agent.reads()]))
    return Compaction(summary, after, warm)


def figures(seen: Mapping[str, list[Compaction]]) -> dict[str, Any]:
    """Of one client. seen: of each arm, a compaction a round."""
    arms = {
        name: {
            "summary_ttft_ms": spread([one.summary.ttft_ms for one in all_], 1),
            "summary_cached_share": spread(
                [one.summary.cached_tokens / one.summary.prompt_tokens for one in all_]
            ),
            "cold_tokens": spread(
                [one.after.prompt_tokens - one.after.cached_tokens for one in all_], 0
            ),
            "after_ttft_ms": spread([one.after.ttft_ms for one in all_], 1),
            "warm_ttft_ms": spread([one.warm.ttft_ms for one in all_], 1),
            "ttft_after_over_warm": ratio_spread(
                [one.after.ttft_ms for one in all_], [one.warm.ttft_ms for one in all_]
            ),
            "wait_s": spread([waited_s(one) for one in all_]),
        }
        for name, all_ in seen.items()
    }
    ours = [waited_s(one) for one in seen["ours"]]
    return {
        "arms": arms,
        **{
            f"wait_vs_{name}": ratio_spread(ours, [waited_s(one) for one in all_])
            for name, all_ in seen.items()
            if name != "ours"
        },
    }


def waited_s(one: Compaction) -> float:
    """How long a person waits for the summary and the first token after it."""
    return one.summary.seconds + one.after.ttft_ms / 1e3


def differing(seen: Mapping[str, list[Compaction]]) -> int:
    """How many of our answers, of equal prompts, are not stock SGLang's."""
    pairs = zip(seen["ours"], seen["stock"], strict=True)
    return sum(
        mine.text != other.text
        for one, stock in pairs
        for mine, other in ((one.after, stock.after), (one.warm, stock.warm))
    )


async def measure(nodes: Mapping[str, Node], load: Load) -> dict[str, Any]:
    """Plays all rounds; each arm has its turn of a round, with an empty cache."""
    texts = fitted(nodes["stock"])
    seen: dict[str, dict[str, list[Compaction]]] = {client: defaultdict(list) for client in CLIENTS}
    async with clients.clients() as http:
        for number in range(load.rounds + 1):  # the first warms up
            for client in CLIENTS:
                for name in rotated(list(nodes), number):
                    nodes[name].flush()
                    agent = Agent(texts, load, client, f"round {number}")
                    one = await compact(http, nodes[name].url, agent, load)
                    if number:
                        seen[client][name].append(one)
    found = {client: figures(arms) for client, arms in seen.items()}
    for client, of_client in found.items():
        share = of_client["arms"]["ours"]["summary_cached_share"]["min"]
        require(share > 0.5, "our summaries read what is cached", client=client, share=share)
    wrong = sum(map(differing, seen.values()))
    ratios = [each["arms"]["ours"]["ttft_after_over_warm"]["median"] for each in found.values()]
    return {**found, "wrong_answers": wrong, "ttft_after_over_warm": max(ratios)}


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    load = LOADS[options.size]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = chosen(options, "tiny")
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as name:
        folder = Path(name)
        # HiCache writes a file for each page.
        flags = ("--max-total-tokens", str(load.pool), "--page-size", "16")
        host = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
        files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "pages")}
        hicache = Arm(host, environment=files)
        arms = {"ours": OURS, "stock": STOCK, "stock_hicache": hicache}
        with engines.serving(arms, *flags, folder=folder) as nodes:
            run("compaction", lambda: asyncio.run(measure(nodes, load)))


if __name__ == "__main__":
    main()
