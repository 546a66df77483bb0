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

`lost`: requests without a whole answer while engines restart one by one. `wrong_answers`: greedy
answers of any arm that differ from those of `stock`, after restarts and kills alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from sgl_ext_cpu.node import FORKING, Node

from bench.lib.clients import MESSAGES, Answer, ask
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.pin_load import Conversation, single
from bench.lib.script import Size, precondition, require, run
from bench.lib.texts import Texts, fitted

STOCK, FILE, MEMORY, OURS = "stock", "stock_file", "ours_memory", "ours"
ARMS = (STOCK, FILE, MEMORY, OURS)
_HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", "64"),
    *("--hicache-storage-prefetch-policy", "timeout"),
)
_TIER_BYTES = str(4 << 30)
_FILE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_RESTART = "/sgl_ext/restart"
_ENGINES = 2
_POLL_S = 0.25
# What was answered is stored within this time, on a machine that has nothing else to do.
_STORED_S = 2.0


@dataclass(frozen=True)
class Plan:
    """sessions, prefix_tokens: of the rolling restart. pause_s: between a session's turns.
    long_tokens: of the prompt of the node's restart. kills: how often the node is killed."""

    sessions: int
    prefix_tokens: int
    pause_s: tuple[float, float]
    long_tokens: int
    kills: int
    pool_tokens: int


PLANS: Mapping[Size, Plan] = {
    "full": Plan(16, 4000, (3.0, 8.0), 48_000, 8, 131_072),
    "quick": Plan(8, 2500, (2.0, 5.0), 24_000, 2, 65_536),
    "brief": Plan(6, 2000, (2.0, 4.0), 12_000, 1, 32_768),
    "smallest": Plan(2, 600, (2.0, 3.0), 1500, 1, 8192),
}


class Servers:
    """The two engines of one arm, of which some may be down. ask: sends a session's request."""

    def __init__(self, arm: str, engines: Engines, plan: Plan, folder: Path) -> None:
        self.arm = arm
        self._engines = engines
        self._folder = folder / arm
        self._disk = folder / f"{arm}-tier"
        self._flags = ("--max-total-tokens", str(plan.pool_tokens))
        self._running: list[ExitStack] = []
        self.nodes: list[Node] = []
        self._down: set[int] = set()

    def start(self) -> None:
        """Starts all engines."""
        if self.arm in (MEMORY, OURS):
            on_disk = ("--disk-tier", str(self._disk), "--disk-tier-bytes", _TIER_BYTES)
            in_memory = ("--shared-tier-bytes", _TIER_BYTES)
            tier = on_disk if self.arm == OURS else in_memory
            flags = (*self._flags, *_HICACHE, *tier, "--instances", str(_ENGINES))
            self._enter(self._engines.ours(self._folder, *flags, environment=FORKING))
            return
        self._running, self.nodes = [ExitStack()] * _ENGINES, [None] * _ENGINES  # type: ignore[list-item]
        with ThreadPoolExecutor() as pool:
            places = range(_ENGINES)
            list(pool.map(lambda place: self._enter(self._stock(place), place), places))

    def _stock(self, number: int) -> AbstractContextManager[Node]:
        """Starts one stock engine."""
        more, environment = tuple[str, ...](), dict(FORKING)
        if self.arm == FILE:
            self._disk.mkdir(exist_ok=True)
            more = (*_HICACHE, "--hicache-storage-backend", "file")
            environment[_FILE_FOLDER] = str(self._disk)
        folder = self._folder.with_name(f"{self.arm}-{number}")
        return self._engines.stock(folder, *self._flags, *more, environment=environment)

    def _enter(self, server: AbstractContextManager[Node], place: int | None = None) -> None:
        stack = ExitStack()
        node = stack.enter_context(server)
        if place is None:
            self._running.append(stack)
            self.nodes.append(node)
        else:
            self._running[place], self.nodes[place] = stack, node

    def kill(self) -> None:
        """Kills every process at once, without a warning."""
        found = [psutil.Process(node.process.pid) for node in self.nodes]
        found += [child for each in found for child in each.children(recursive=True)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=30)
        self.stop()

    def stop(self) -> None:
        for stack in self._running:
            with suppress(ProcessLookupError):
                stack.close()
        self._running, self.nodes = [], []

    def url(self, session: int) -> str:
        """Where a session's request goes."""
        if len(self.nodes) == 1:
            return self.nodes[0].url
        place = session % _ENGINES
        return self.nodes[place if place not in self._down else (place + 1) % _ENGINES].url

    async def restart_one_by_one(self, is_idle: Callable[[str], bool]) -> None:
        """Restarts all engines while sessions go on. is_idle: whether no request is at a URL."""
        if len(self.nodes) == 1:
            await _restart_ours(self.nodes[0].url)
            return
        for place in range(_ENGINES):
            self._down.add(place)
            while not is_idle(self.nodes[place].url):  # noqa: ASYNC110 - requests end elsewhere
                await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self._running[place].close)
            await asyncio.to_thread(self._enter, self._stock(place), place)
            self._down.clear()


async def _restart_ours(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.post(url + _RESTART, json={}) as answer:
            require(answer.status < 300, "a rolling restart begins", said=await answer.text())
        while True:
            await asyncio.sleep(_POLL_S)
            async with http.get(url + _RESTART) as answer:
                restart = await answer.json()
            if restart["state"] != "running":
                require(restart["state"] == "done", "engines restart", said=restart["error"])
                return


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
    the long prompts, by kill. read: their answers."""

    cached_share: float = 0.0
    rolled: dict[tuple[int, int], Answer] = field(default_factory=dict)
    restart_s: float = 0.0
    prefill_ms: list[float] = field(default_factory=list)
    read: list[Answer] = field(default_factory=list)
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
        await self._long(http, self._texts.fresh("Warm-up", plan.long_tokens))
        cold = await self._long(http, prompts[0])
        await asyncio.sleep(_STORED_S)
        beside = asyncio.create_task(self._long(http, prompts[1]))
        await asyncio.sleep(random.Random(number).uniform(0.2, 1.0) * cold.ttft_ms / 1000)
        await asyncio.to_thread(servers.kill)
        await beside  # it has no answer: its node is gone
        began_s = time.monotonic()
        await asyncio.to_thread(servers.start)
        self.seen.start_s.append(time.monotonic() - began_s)
        await self._long(http, self._texts.fresh("First request", 500))
        self.seen.prefill_ms.append(cold.ttft_ms)
        self.seen.read.append(await self._long(http, prompts[0]))
        self.seen.read[-1].content += (await self._long(http, prompts[1])).text + cold.text

    async def _long(self, http: aiohttp.ClientSession, text: str) -> Answer:
        return await ask(http, self._servers.url(0), MESSAGES, single(text))


def compared(seen: Mapping[str, Seen], *, are_exact: bool) -> dict[str, Any]:
    """The figures of all arms. Raises InvariantBroken for a wrong answer."""
    wrong = answers = 0
    for arm in seen.values():
        rolled = seen[STOCK].rolled
        pairs = [(a, rolled[key]) for key, a in arm.rolled.items() if key in rolled]
        pairs += zip(arm.read, seen[STOCK].read, strict=True)
        wrong += sum(a.text != b.text for a, b in pairs if a.is_whole and b.is_whole)
        answers += len(pairs)
    require(wrong == 0 or not are_exact, "answers equal those of stock", wrong=wrong)
    lost = {name: sum(not a.is_whole for a in arm.rolled.values()) for name, arm in seen.items()}
    ours = seen[OURS]
    precondition(seen[STOCK].cached_share < 0.95, "restarts lose prefixes of stock SGLang")
    return {
        "cached_share_after_rolling": round(ours.cached_share, 4),
        "ttft_after_node_restart_over_prefill": round(ours.ratio, 4),
        "wrong_answers": wrong,
        "lost": lost[OURS],
        "answers": answers,
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


def measure(engines: Engines, plan: Plan, folder: Path, arms: Sequence[str]) -> dict[str, Any]:
    """Runs the arms one after another and returns the bench's figures."""
    seen: dict[str, Seen] = {}
    texts: Texts | None = None
    for arm in arms:
        servers = Servers(arm, engines, plan, folder)
        try:
            servers.start()
            texts = texts or fitted(servers.nodes[0])
            seen[arm] = asyncio.run(Trial(servers, texts, plan).run())
        finally:
            servers.stop()
    return compared(seen, are_exact=engines.are_exact)


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="default: all")
    options = parser.parse_args()
    engines = chosen(options, model_of(options.size, "bench"))
    # TMPDIR must not be in memory: a disk tier there would be none.
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as made:
        run("restarts", lambda: measure(engines, PLANS[options.size], Path(made), options.arms))


if __name__ == "__main__":
    main()
