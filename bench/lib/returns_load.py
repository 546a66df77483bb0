"""bench/speculative_prefill while other work takes a session's memory as its tool runs."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from bench.lib.pin_load import Answer, flood
from bench.lib.script import precondition, require
from bench.lib.speculative_load import Load, Person, Reply, Stage, ask
from bench.lib.spread import percentiles_ms, ratio_spread
from sgl_ext.protocols.routes import PREFILL

_LOADED, _GUESSED = "sgl_ext_loaded_ahead_tokens_total", "sgl_ext_prefilled_ahead_tokens_total"
_HOST_READS = re.compile(r'^sglang:cached_tokens_total\{.*cache_source="host".*\} (\S+)$', re.M)
_ANSWER_TOKENS = 8
_CONNECTIONS = 2
_GUESS_S = 60.0
_LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Plan:
    """rounds: plays of each arm and prefix. prefixes: their tokens. tool_s: from and to."""

    rounds: int = 12
    pool_tokens: int = 16_384
    prefixes: tuple[int, ...] = (3_000, 12_000)
    tool_s: tuple[float, float] = (6.0, 8.0)

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of the engine."""
        host = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
        policy = ("--hicache-write-policy", "write_through")
        return ("--max-total-tokens", str(self.pool_tokens), *host, *policy)


@dataclass(frozen=True)
class Came:
    """A session's return. had: the tokens of its last prompt. loaded: of them, ahead of the return.
    host: by it."""

    answer: Answer
    had: int
    loaded: int
    host: int

    @property
    def on_device(self) -> int:
        """The tokens that were on the device when it came."""
        return self.answer.cached_tokens - self.host


class Returning:
    """An engine with host memory, and sessions whose tool runs while other work is served."""

    def __init__(self, node: Node, stage: Stage, plan: Plan) -> None:
        self._node = node
        self._stage = stage
        self._plan = plan

    async def play(self, name: str, prefix: int, *, is_loaded: bool) -> Came:
        """A session calls its tool, other work takes its memory, and it returns.

        Without `is_loaded`, the client withdraws what the engine expects after the answer.
        """
        self._node.flush()
        stage = self._stage
        guessed, loaded = self._node.metric(_GUESSED), self._node.metric(_LOADED)
        person = Person(Load(system=prefix, result=50), stage, "ours", name)
        body, _ = person.writes(1)
        call = await ask(stage.http, stage.url, body | {"prompt_cache_key": name})
        require(call.seen.is_whole, "every request is answered whole")
        answered_s = time.perf_counter()
        async with asyncio.timeout(_GUESS_S):  # until the few tokens after the answer are computed
            while self._node.metric(_GUESSED) == guessed:  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.05)
        if not is_loaded:
            self._withdraw(name)
        work = stage.texts.flood(name, self._plan.pool_tokens)
        done = await flood(stage.http, stage.url, work, _CONNECTIONS)
        require(all(one.is_whole for one in done.answers), "every request is answered whole")
        tool_s = random.Random(name).uniform(*self._plan.tool_s)
        await asyncio.sleep(answered_s + tool_s - time.perf_counter())
        loaded, host = self._node.metric(_LOADED) - loaded, self._host_reads()
        reply = await ask(stage.http, stage.url, self._return(person, call, name))
        text = reply.thought + reply.content
        seen = replace(reply.seen, text=text)
        return Came(seen, call.seen.prompt_tokens, int(loaded), self._host_reads() - host)

    def _return(self, person: Person, call: Reply, name: str) -> dict[str, Any]:
        body = person.reads(call)
        del body["regex"], body["logit_bias"]  # a grammar takes time that is not of interest here
        hints = {"agent_hints": {"speculative_prefill": False}}
        return body | {"max_tokens": _ANSWER_TOKENS, "prompt_cache_key": name, "nvext": hints}

    def _withdraw(self, name: str) -> None:
        answer = requests.delete(
            f"{self._stage.url}{PREFILL}", params={"session": name}, timeout=30
        )
        require(answer.json() == {"deleted": 1}, "a session can be withdrawn", said=answer.text)

    def _host_reads(self) -> int:
        page = requests.get(f"{self._stage.url}/metrics", timeout=30).text
        return int(sum(map(float, _HOST_READS.findall(page))))


def figures(off: Sequence[Came], ours: Sequence[Came], *, are_exact: bool) -> dict[str, Any]:
    """What loading ahead saves of the TTFT of these returns: pairs of the same session. Raises
    InvariantBroken if they differ in more, and NotValid if prefixes were not where they should
    be."""
    every = (*off, *ours)
    require(all(came.answer.is_whole for came in every), "every request is answered whole")
    wrong = sum(a.answer.text != b.answer.text for a, b in zip(off, ours, strict=True))
    require(wrong == 0 or not are_exact, "answers do not depend on the load", wrong=wrong)
    require(not any(came.loaded for came in off), "nothing is loaded for a session that withdrew")
    spilled = statistics.mean(came.host / came.had for came in off)
    precondition(spilled > _LEAST_SHARE, "other work spills the prefixes", share=spilled)
    ready = statistics.mean(came.on_device / came.had for came in ours)
    precondition(ready > _LEAST_SHARE, "prefixes are loaded before their sessions", share=ready)
    times = [[came.answer.ttft_ms for came in each] for each in (off, ours)]
    return {
        "prompt_tokens": round(statistics.mean(came.had for came in every)),
        "spilled_share": round(spilled, 4),
        "ready_share": round(ready, 4),
        **percentiles_ms("off_ttft", times[0]),
        **percentiles_ms("ttft", times[1]),
        "ttft_ours_over_off": ratio_spread(times[1], times[0]),
        "wrong_answers": wrong,
    }
