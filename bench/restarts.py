"""What do restarts leave of the cache: of engines one after another, and of a whole node at once?

Each arm has two engines with the same model and gets the same prompts, one arm after the other:

    stock          SGLang without the plugin
    stock_file     SGLang with HiCache and its `file` backend, on the same disk
    ours_memory    our node with a shared tier in memory, which a node's end removes
    ours           our node with a disk tier

**Rolling.** Sessions take turns, with pauses, while all engines restart one by one. A stock arm has
the best router that knows nothing of caches: a session stays at its engine, goes to the other one
while its own restarts, and comes back. `cached_share` is of the turns from the start of the restart
to the first one of each session after its end: of the tokens of a session's turn before, how many
were cached. `cached_share_after_rolling` is that of ours.

**Node.** A long prompt is computed, and every process of the arm is killed with SIGKILL, a while
after the answer and at a moment by chance (`kills` times). Then the arm starts again.
`ttft_after_node_restart_over_prefill` is the TTFT of the same prompt after the restart, over that
of another prompt of the same length that nobody has computed; the median of all kills.

Beside that, `probes` short prompts a kill are sent: half of them before it, and half of them when
it comes. All are sent again after the restart, and their answers are compared with stock's
(`answers_after_kills`).

`lost`: requests without a whole answer while engines restart one by one, or after a restart.
`wrong_answers`: greedy answers of any arm that differ from those of `stock`, after restarts and
kills alike.

`--day` plays recorded sessions instead (`bench/lib/restarts_day.py`), by default on `stock` and
`ours`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from bench.lib import restarts_day
from bench.lib.clients import MESSAGES, Answer, ask
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.pin_load import Conversation, single
from bench.lib.restarted_servers import ARMS, OURS, STOCK, Servers
from bench.lib.restarts_day import DAYS, Day
from bench.lib.script import Size, precondition, require, run
from bench.lib.texts import Texts, fitted
from bench.recorded.sessions import find_file, made_sessions, read_sessions

# What was answered is stored within this time, on a machine that has nothing else to do.
_STORED_S = 2.0
_PROBE_HEAD_TOKENS, _PROBE_TOKENS, _PROBES_AT_ONCE = 400, 150, 8


@dataclass(frozen=True)
class Plan:
    """sessions, prefix_tokens: of the rolling restart. pause_s: between a session's turns.
    long_tokens: of the prompt of the node's restart. kills: how often the node is killed. probes:
    short prompts at each kill."""

    sessions: int
    prefix_tokens: int
    pause_s: tuple[float, float]
    long_tokens: int
    kills: int
    probes: int
    pool_tokens: int


PLANS: Mapping[Size, Plan] = {
    "full": Plan(16, 4000, (3.0, 8.0), 48_000, 8, 128, 131_072),
    "quick": Plan(8, 2500, (2.0, 5.0), 24_000, 1, 64, 65_536),
    "brief": Plan(6, 2000, (2.0, 4.0), 12_000, 1, 16, 32_768),
    "smallest": Plan(2, 600, (2.0, 3.0), 1500, 1, 4, 8192),
}


@dataclass
class Session:
    """A conversation with the answers to its turns. began: those it had when restarts began."""

    talk: Conversation
    number: int
    answers: list[Answer] = field(default_factory=list)
    began: int = 0

    async def turn(self, http: aiohttp.ClientSession, url: str) -> None:
        self.answers.append(await ask(http, url, self.talk.path, self.talk.ask()))

    def cached(self) -> Iterator[tuple[int, int]]:
        """Of each turn since restarts began: its cached tokens that the turn before had, and the
        tokens that this had."""
        for before, turn in pairwise(self.answers[self.began - 1 :]):
            yield min(turn.cached_tokens, before.prompt_tokens), before.prompt_tokens


@dataclass
class Seen:
    """What one arm measured. rolled: answers by session and turn. prefill_ms, read_ms: TTFTs of
    the long prompts, by kill. read: their answers. probed: those of the short ones after kills."""

    cached_share: float = 0.0
    rolled: dict[tuple[int, int], Answer] = field(default_factory=dict)
    restart_s: float = 0.0
    prefill_ms: list[float] = field(default_factory=list)
    read: list[Answer] = field(default_factory=list)
    probed: list[Answer] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The TTFT of a long prompt after a restart, over that of its prefill."""
        pairs = zip(self.read, self.prefill_ms, strict=True)
        return statistics.median(answer.ttft_ms / cold for answer, cold in pairs)


class Trial:
    """One arm's run."""

    def __init__(self, servers: Servers, texts: Texts, plan: Plan) -> None:
        self._servers = servers
        self._texts = texts
        self._plan = plan
        self._in_flight: list[str] = []
        self.seen = Seen()

    async def run(self) -> Seen:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
            await self._roll(http)
            for number in range(self._plan.kills):
                await self._kill(http, number)
        return self.seen

    async def _roll(self, http: aiohttp.ClientSession) -> None:
        plan, is_over = self._plan, asyncio.Event()
        systems = [
            self._texts.fresh(f"Session {n}", plan.prefix_tokens) for n in range(plan.sessions)
        ]
        sessions = [Session(Conversation(s, self._texts), n) for n, s in enumerate(systems)]

        async def take_turns(session: Session) -> None:
            chance, is_last = random.Random(session.number), False
            while not is_last:
                await asyncio.sleep(chance.uniform(*plan.pause_s))
                is_last = is_over.is_set()
                url = self._servers.url(session.number)
                self._in_flight.append(url)
                await session.turn(http, url)
                self._in_flight.remove(url)

        for session in sessions:
            for _ in range(2):
                await session.turn(http, self._servers.url(session.number))
            session.began = len(session.answers)
        playing = [asyncio.create_task(take_turns(session)) for session in sessions]
        began_s = time.monotonic()
        await self._servers.restart_one_by_one(lambda url: url not in self._in_flight)
        self.seen.restart_s = time.monotonic() - began_s
        is_over.set()
        await asyncio.gather(*playing)
        pairs = [pair for session in sessions for pair in session.cached()]
        self.seen.cached_share = sum(found for found, _ in pairs) / sum(had for _, had in pairs)
        self.seen.rolled = {
            (session.number, turn): answer
            for session in sessions
            for turn, answer in enumerate(session.answers)
        }

    async def _kill(self, http: aiohttp.ClientSession, number: int) -> None:
        """Kills the arm a while after a long prompt, and beside work whose pages are written."""
        plan, servers = self._plan, self._servers
        prompts = [self._texts.fresh(f"Long {number}, {which}", plan.long_tokens) for which in "AB"]
        head = self._texts.fresh(f"Probes {number}", _PROBE_HEAD_TOKENS)
        probes = [self._probe(head, number, place) for place in range(plan.probes)]
        await self._long(http, self._texts.fresh("Warm-up", plan.long_tokens))
        cold = await self._long(http, prompts[0])
        await self._all(http, probes[::2])
        await asyncio.sleep(_STORED_S)
        beside = asyncio.gather(self._long(http, prompts[1]), self._all(http, probes[1::2]))
        await asyncio.sleep(random.Random(number).uniform(0.2, 1.0) * cold.ttft_ms / 1000)
        await asyncio.to_thread(servers.kill)
        await beside  # most have no answer: their node is gone
        began_s = time.monotonic()
        await asyncio.to_thread(servers.start)
        self.seen.start_s.append(time.monotonic() - began_s)
        await self._long(http, self._texts.fresh("First request", 500))
        self.seen.prefill_ms.append(cold.ttft_ms)
        self.seen.read.append(await self._long(http, prompts[0]))
        self.seen.read[-1].content += (await self._long(http, prompts[1])).text + cold.text
        self.seen.probed += await self._all(http, probes)

    def _probe(self, head: str, kill: int, place: int) -> str:
        own = self._texts.fresh(f"Probe {kill}, {place}", _PROBE_TOKENS)
        return f"{head}\n{own}"

    async def _all(self, http: aiohttp.ClientSession, texts: Sequence[str]) -> list[Answer]:
        """The answers to prompts that are sent a few at once."""
        few = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def one(text: str) -> Answer:
            async with few:
                return await self._long(http, text)

        return await asyncio.gather(*map(one, texts))

    async def _long(self, http: aiohttp.ClientSession, text: str) -> Answer:
        return await ask(http, self._servers.url(0), MESSAGES, single(text))


def compared(seen: Mapping[str, Seen], *, are_exact: bool) -> dict[str, Any]:
    """The figures of all arms. Raises InvariantBroken for a wrong answer."""
    wrong = answers = 0
    for arm in seen.values():
        rolled = seen[STOCK].rolled
        pairs = [(a, rolled[key]) for key, a in arm.rolled.items() if key in rolled]
        pairs += zip(arm.read, seen[STOCK].read, strict=True)
        pairs += zip(arm.probed, seen[STOCK].probed, strict=True)
        wrong += sum(a.text != b.text for a, b in pairs if a.is_whole and b.is_whole)
        answers += len(pairs)
    require(wrong == 0 or not are_exact, "answers equal those of stock", wrong=wrong)
    lost = {
        name: sum(not a.is_whole for a in (*arm.rolled.values(), *arm.read, *arm.probed))
        for name, arm in seen.items()
    }
    ours = seen[OURS]
    precondition(seen[STOCK].cached_share < 0.95, "restarts lose prefixes of stock SGLang")
    return {
        "cached_share_after_rolling": round(ours.cached_share, 4),
        "ttft_after_node_restart_over_prefill": round(ours.ratio, 4),
        "wrong_answers": wrong,
        "lost": lost[OURS],
        "answers": answers,
        "answers_after_kills": len(ours.read) + len(ours.probed),
        "long_prompt_tokens": ours.read[0].prompt_tokens,
        "arms": {
            name: {
                "cached_share": round(arm.cached_share, 4),
                "turns": len(arm.rolled),
                "lost": lost[name],
                "restart_s": round(arm.restart_s, 1),
                "ttft_ratio": round(arm.ratio, 4),
                "prefill_s": round(statistics.median(arm.prefill_ms) / 1000, 2),
                "read_s": round(statistics.median(a.ttft_ms for a in arm.read) / 1000, 2),
                "read_share": round(
                    sum(a.cached_tokens for a in arm.read) / sum(a.prompt_tokens for a in arm.read),
                    4,
                ),
                "start_s": round(statistics.median(arm.start_s), 1),
            }
            for name, arm in seen.items()
        },
    }


ArmRun = Callable[[Servers], Coroutine[Any, Any, Any]]


def play(
    engines: Engines, pool_tokens: int, folder: Path, arms: Sequence[str], run_arm: ArmRun
) -> dict[str, Any]:
    """Runs the arms one after another; what each measured."""
    seen: dict[str, Any] = {}
    for arm in arms:
        servers = Servers(arm, engines, pool_tokens, folder)
        try:
            servers.start()
            seen[arm] = asyncio.run(run_arm(servers))
        finally:
            servers.stop()
    return seen


def measure(engines: Engines, plan: Plan, folder: Path, arms: Sequence[str]) -> dict[str, Any]:
    """The bench's figures."""
    texts: list[Texts] = []

    def trial(servers: Servers) -> Coroutine[Any, Any, Seen]:
        if not texts:
            texts.append(fitted(servers.nodes[0]))
        return Trial(servers, texts[0], plan).run()

    seen = play(engines, plan.pool_tokens, folder, arms, trial)
    return compared(seen, are_exact=engines.are_exact)


def measure_day(engines: Engines, size: Size, folder: Path, arms: Sequence[str]) -> dict[str, Any]:
    """The figures of a day."""
    file, plan = find_file(), DAYS[size]
    sessions = made_sessions(8 * plan.agents) if file is None else read_sessions(file)
    played = restarts_day.plays(sessions, plan)
    pool, source = restarts_day.POOL_TOKENS, "made" if file is None else "recorded"
    seen = play(engines, pool, folder, arms, lambda servers: Day(servers, played).run())
    found = restarts_day.compared(seen, played, ours=OURS, stock=STOCK)
    wrong = found["wrong_answers"]
    require(wrong == 0 or not engines.are_exact, "answers equal those of stock", wrong=wrong)
    return {"form": "day", "source": source, **found}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all")
    parser.add_argument("--day", action="store_true", help="a day of recorded sessions")
    options = parser.parse_args()
    size, arms = options.size, options.arms or ((STOCK, OURS) if options.day else ARMS)
    engines = chosen(options, model_of(size, "tiny" if options.day else "bench"))
    # TMPDIR must not be in memory: a disk tier there would be none.
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as made:
        folder = Path(made)
        if options.day:
            run("restarts", lambda: measure_day(engines, size, folder, arms))
        else:
            run("restarts", lambda: measure(engines, PLANS[size], folder, arms))


if __name__ == "__main__":
    main()
