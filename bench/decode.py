"""How many tokens a step do drafts from context give, and how much faster are answers with them?

Made sessions of an agent that edits this repository's own files: it reads one, says what it will do
in words that are in no file, edits a few lines of it by quoting them, runs a test, and in one
session of four writes the whole file. The model's answers are a script; the engine, its sampling
and the search for drafts are real. Arms:

    stock   SGLang without the plugin
    ours    our engine with draft-from-context session, without the balancer, as stock

A round plays new sessions, the same on both arms, one arm after the other in alternating order:
some one by one, then sixteen at once up to the test. `tokens_a_step` is of the sessions played one
by one. Rates are tokens of answers over the time from an answer's first token to its end for one
stream, and over the whole round for sixteen. `job_time_ratio` is the time of all sessions played
one by one, with their prompts. A wrong answer is one that is not the script's, or, of prompts that
the model itself answers at temperature 0, one that differs from stock's.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import ROOT, Node

from bench.lib.clients import CHAT, ask, clients
from bench.lib.engines import OURS, STOCK, chosen, engine_parser, model_of, rotated
from bench.lib.script import Size, require, run
from bench.lib.spread import ratio_spread, spread

_STREAMS = 16
_SESSION_HEADER = "x-sgl-ext-session-id"
_NGRAM = (
    "NGRAM does not start on the CPU platform: sglang.kernels.ops.speculative.reconstruct_tree "
    "imports sgl_kernel.speculative, which has no build for it"
)
_COUNTERS = ("draft_steps", "drafted_tokens", "accepted_drafts")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string"} for field in fields},
            },
        },
    }
    for name, fields in {
        "Read": ("file_path",),
        "Edit": ("file_path", "old_string", "new_string"),
        "Write": ("file_path", "content"),
        "Bash": ("command",),
    }.items()
]


@dataclass(frozen=True)
class Plan:
    """Rounds, sessions played one by one in each, and answers of the model itself to compare."""

    rounds: int
    singles: int
    compared: int


PLANS: dict[Size, Plan] = {
    "full": Plan(7, 6, 600),
    "quick": Plan(3, 3, 96),
    "brief": Plan(2, 2, 32),
    "smallest": Plan(1, 1, 8),
}


@dataclass(frozen=True)
class Turn:
    """An answer of the script, and what the tool that it calls returns; "" for a last turn."""

    text: str
    call: tuple[str, dict[str, str]] | None
    result: str = ""


@dataclass(frozen=True)
class Session:
    """A task and its turns. The task's text is in no other session."""

    task: str
    turns: tuple[Turn, ...]

    def lines(self) -> list[str]:
        """The turns as lines of a script."""
        return [
            json.dumps(
                {"after": self.task, "text": turn.text}
                | (
                    {"tool_calls": [{"name": turn.call[0], "arguments": turn.call[1]}]}
                    if turn.call
                    else {}
                )
            )
            for turn in self.turns
        ]


@dataclass
class Played:
    """What came of sessions: tokens of answers, the time from first tokens to ends, the time of
    all, and wrong answers."""

    tokens: int = 0
    decoding_s: float = 0.0
    seconds: float = 0.0
    wrong: int = 0


def made_sessions(number: int, seed: int = 1) -> list[Session]:
    """So many sessions of this repository's files. Raises RuntimeError outside of a checkout."""
    source = random.Random(seed)
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "docs/*.md"], cwd=ROOT, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.split()]
    # No parser tells a call from the markup of one in a file, SGLang's neither.
    files = [
        path
        for path in paths
        if path.suffix == ".py"
        and 2_000 < path.stat().st_size < 7_000
        and not any(markup in path.read_text() for markup in ("<|", "tool_call>"))
    ]
    said = [
        sentence.strip()
        for path in paths
        if path.suffix == ".md"
        for sentence in re.split(r"(?<=\.)\s", path.read_text())
        if 60 < len(sentence) < 240 and "|" not in sentence and "`" not in sentence
    ]
    if len(files) < 20 or len(said) < 100:
        raise RuntimeError("bench.decode: sessions are made from a checkout's files, found few")
    return [
        _session(source, f"Task {n:04d}-{seed}", source.choice(files), n % 4 == 3, files, said)
        for n in range(number)
    ]


def _session(
    source: random.Random,
    name: str,
    file: Path,
    writes: bool,
    files: Sequence[Path],
    said: Sequence[str],
) -> Session:
    path, content = str(file.relative_to(ROOT)), file.read_text()
    lines = content.splitlines()
    foreign = source.choice(files).read_text().splitlines()

    def think(sentences: int = 1) -> str:
        return " ".join(source.choice(said) for _ in range(sentences))

    def edit() -> tuple[str, dict[str, str]]:
        at, size = source.randrange(len(lines) - 12), source.randrange(3, 10)
        old = lines[at : at + size]
        new = list(old)
        new[source.randrange(size)] = source.choice(foreign)
        new.insert(source.randrange(size), source.choice(foreign))
        texts = {"old_string": "\n".join(old), "new_string": "\n".join(new)}
        return "Edit", {"file_path": path, **texts}

    def written() -> tuple[str, dict[str, str]]:
        new = list(lines)
        for _ in range(4):
            new[source.randrange(len(new))] = source.choice(foreign)
        return "Write", {"file_path": path, "content": "\n".join(new)}

    test = f"python -m pytest -q tests/{file.stem} -k {source.choice(foreign).strip()[:12]!r}"
    output = "\n".join(f"{path}:{source.randrange(400)}: {line}" for line in foreign[:20])
    numbered = "\n".join(f"{n:5}\t{line}" for n, line in enumerate(lines, 1))
    shown = numbered if source.random() < 0.5 else content
    turns = (
        Turn(think(), ("Read", {"file_path": path}), shown),
        Turn(think(), edit(), f"{path} was edited."),
        Turn(think(), ("Bash", {"command": test}), output),
        Turn(think(), written() if writes else edit(), f"{path} was edited."),
        Turn(think(3), None),
    )
    return Session(f"{name}: {think()} Look at {path}.", turns)


async def play(http: aiohttp.ClientSession, url: str, session: Session, into: Played) -> None:
    """Plays a session to its end. What the script says is the conversation, whatever came."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that edits files. Use the tools."},
        {"role": "user", "content": session.task},
    ]
    for number, turn in enumerate(session.turns):
        body = {"model": "model", "messages": messages, "tools": _TOOLS, "max_tokens": 6_000}
        seen = await ask(http, url, CHAT, body, {_SESSION_HEADER: session.task[:11]})
        require(seen.is_whole, "every request is answered whole")
        into.tokens += seen.answer_tokens
        into.decoding_s += seen.seconds - seen.ttft_ms / 1000
        functions = [call["function"] for call in seen.calls.values()]
        calls = [(one["name"], _read(one["arguments"])) for one in functions]
        wanted = [] if turn.call is None else [turn.call]
        into.wrong += seen.content.strip() != turn.text.strip() or calls != wanted
        answered: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.call is not None:
            name, arguments = turn.call
            function = {"name": name, "arguments": json.dumps(arguments)}
            answered["tool_calls"] = [
                {"id": f"call_{number}", "type": "function", "function": function}
            ]
        messages.append(answered)
        if turn.call is not None:
            messages.append(
                {"role": "tool", "tool_call_id": f"call_{number}", "content": turn.result}
            )


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


async def play_all(url: str, sessions: Sequence[Session], at_once: int) -> Played:
    """Plays sessions, so many at a time."""
    played, left = Played(), list(sessions)
    async with clients() as http:

        async def work() -> None:
            while left:
                await play(http, url, left.pop(0), played)

        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(at_once)))
        played.seconds = time.perf_counter() - started_s
    return played


async def own_answers(url: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The model's own greedy answers to prompts of tokens."""
    limit = asyncio.Semaphore(8)
    async with clients() as http:

        async def answer(prompt: Sequence[int]) -> list[int]:
            sampling = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
            body = {"input_ids": list(prompt), "sampling_params": sampling}
            async with limit, http.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                ids: list[int] = (await response.json())["output_ids"]
                return ids

        return await asyncio.gather(*(answer(prompt) for prompt in prompts))


def own_prompts(number: int) -> list[list[int]]:
    """Prompts that repeat parts of themselves, so that drafts are sent, right and wrong ones."""
    source = random.Random(7)
    prompts = []
    for _ in range(number):
        part = [source.randrange(300, 4_000) for _ in range(source.randrange(8, 60))]
        other = [source.randrange(300, 4_000) for _ in range(source.randrange(8, 60))]
        prompts.append([*part, *other, *part, *other[: len(other) // 2], *part[:-3]])
    return prompts


def _counted(node: Node) -> dict[str, float]:
    return {name: node.metric(f"sgl_ext_{name}_total") for name in _COUNTERS}


def measure_arms(
    nodes: Mapping[str, Node], plan: Plan, sessions: Sequence[Session]
) -> dict[str, Any]:
    """Plays all rounds on engines that run, and returns the figures."""
    urls = {name: node.engines[0] for name, node in nodes.items()}
    left = list(sessions)

    def taken(number: int) -> list[Session]:
        return [left.pop() for _ in range(number)]

    def begun(of: Sequence[Session]) -> list[Session]:
        return [Session(session.task, session.turns[:3]) for session in of]

    for sizes in (taken(1), begun(taken(_STREAMS))):  # both warm up, and ours measures its steps
        for url in urls.values():
            asyncio.run(play_all(url, sizes, len(sizes)))
    one: dict[str, list[Played]] = {name: [] for name in urls}
    many: dict[str, list[Played]] = {name: [] for name in urls}
    drafts = dict.fromkeys(_COUNTERS, 0.0)
    for number in range(plan.rounds):
        singles, streams = taken(plan.singles), begun(taken(_STREAMS))
        for name in rotated(list(urls), number):
            before = _counted(nodes["ours"])
            one[name].append(asyncio.run(play_all(urls[name], singles, 1)))
            if name == "ours":
                after = _counted(nodes["ours"])
                drafts = {key: drafts[key] + after[key] - before[key] for key in drafts}
            many[name].append(asyncio.run(play_all(urls[name], streams, _STREAMS)))
    prompts = own_prompts(plan.compared)
    own = {name: asyncio.run(own_answers(url, prompts)) for name, url in urls.items()}
    differing = sum(a != b for a, b in zip(own["ours"], own["stock"], strict=True))
    wrong = sum(played.wrong for arm in (one, many) for played in arm["ours"])
    stock_wrong = sum(played.wrong for arm in (one, many) for played in arm["stock"])

    require(stock_wrong == 0, "stock gives the script's answers", wrong=stock_wrong)

    def rate(played: Played) -> float:
        return played.tokens / played.decoding_s

    def total(played: Played) -> float:
        return played.tokens / played.seconds

    steps = drafts["draft_steps"]
    ratio_one = ratio_spread(list(map(rate, one["ours"])), list(map(rate, one["stock"])))
    ratio_many = ratio_spread(list(map(total, many["ours"])), list(map(total, many["stock"])))
    jobs = ratio_spread([p.seconds for p in one["ours"]], [p.seconds for p in one["stock"]])
    return {
        "rates_1": {name: spread(list(map(rate, arm)), 1) for name, arm in one.items()},
        "rates_16": {name: spread(list(map(total, arm)), 1) for name, arm in many.items()},
        "vs_stock_1": ratio_one,
        "vs_stock_16": ratio_many,
        "job_time_ratio": jobs,
        "answers": plan.rounds * (5 * plan.singles + 3 * _STREAMS),
        "own_answers_compared": len(prompts),
        "own_answers_differing": differing,
        "script_answers_wrong": {"ours": wrong, "stock": stock_wrong},
        "drafted_tokens": drafts["drafted_tokens"],
        "accepted_share": round(drafts["accepted_drafts"] / max(1.0, drafts["drafted_tokens"]), 3),
        "ngram": _NGRAM,
        "tokens_a_step": round(1 + drafts["accepted_drafts"] / max(1.0, steps), 3),
        "tokens_per_s_vs_stock_1": ratio_one["median"],
        "tokens_per_s_vs_stock_16": ratio_many["median"],
        "wrong_answers": wrong + differing,
    }


def main() -> None:
    """Starts both arms and prints the figures."""
    options = engine_parser(__doc__).parse_args()
    size: Size = options.size
    plan = PLANS[size]
    engines = chosen(options, model_of(size, "bench"))
    sessions = made_sessions(1 + _STREAMS + plan.rounds * (plan.singles + _STREAMS))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.jsonl"
        script.write_text("\n".join(line for session in sessions for line in session.lines()))
        environment = {"SGLEXT_CPU_SCRIPT": str(script), "OMP_NUM_THREADS": "1"}
        arms = {
            "stock": STOCK._replace(environment=environment),
            "ours": OURS._replace(
                flags=("--draft-from-context", "session"), environment=environment
            ),
        }

        def measure() -> dict[str, Any]:
            with engines.serving(arms, folder=Path(folder)) as nodes:
                return measure_arms(nodes, plan, sessions)

        run("decode", measure)


if __name__ == "__main__":
    main()
