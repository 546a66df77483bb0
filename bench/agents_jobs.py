"""How long do whole jobs of coding agents take when the cache holds a third of their working set?

    python -m bench.agents_jobs [--quick] [--ablation]

A job is a lead, the tools that it calls, the sub-agents that it sends out and waits for, and the
person who thinks between two prompts (`bench.agents.jobs`: the published shape, scaled down).
Several jobs run at once, and the next one begins when one is done. Nothing is marked: clients send
what Claude Code sends, with the headers in which it says which agent calls and how long its tools
took. Arms, each on a real engine:

    stock           SGLang without the plugin
    session_radix   SGLang with `--enable-session-radix-cache`: requests name their agent, which
                    is closed at its end
    fixed_ttl       ours, where each prompt is pinned for 300 s and no request is held back
    ours            ours as it is by default, and nothing pinned

Ours has a balancer in front of its engine, and the others have none.

What decides is how much is computed again. So a shape must ask for as much prefill beside decoding
as agents do, who send 320 tokens for each one that they get: here an answer of some 20 tokens
follows a prompt of some thousand (`tokens_in_per_token_out`), and two requests run at once.

The times of tools and people are divided by `pace`. So a prompt takes as large a part of a tool's
time as on a node that computes 20,000 tokens/s of prompts in full size, whatever this machine is.

A round is each arm, in an order that rotates, with an empty cache and the same jobs.
`job_p50_vs_...` is the median job of ours over that of the arm, the median of the rounds: less is
better. `by_round` has the range. A job's time leaves out the time in which its person thinks.
Answers follow a script, so that tools are called, except for each agent's last answer, which is the
model's own at temperature 0: it must be the same in all arms. `starved` are requests of ours that
waited for their first token for more than 30 s, at any size.

The run is not valid unless the tokens of live agents really exceed the memory by far, by the
tokens that the engines counted, and stock SGLang computes prompts again for that reason.

With --ablation the arms beside `stock` are ours, with parts switched off: `not_held`
(`agent-hold-s 0`), and `short_window`, whose queues let the cheapest go first for 10 s at most,
however much waits. How far agents exceed the memory is what `stock` shows: ours starts fewer of
them at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import requests
from sgl_ext_cpu.node import Node, running_balancer

from bench.agents.job_run import Played, Player, Sent
from bench.agents.jobs import ROLES, Maker, Plan, Shape, script_of
from bench.lib.arms import rotated, running_arms
from bench.lib.capacity import measured
from bench.lib.engines import Engines, chosen, engine_parser
from bench.lib.pin_load import Texts
from bench.lib.priority_load import clients, fitted
from bench.lib.script import Size, precondition, require, run
from bench.lib.spread import Spread, ratio_spread
from scheduler.order import MOST
from sgl_ext.settings.schema import EngineSettings

# The figures of bench/agents_jobs.

STARVED_S = 30.0
"""A request that waits longer for its first token has starved."""


def arm_figures(rounds: Sequence[Played]) -> dict[str, Any]:
    """One arm's figures over all rounds."""
    jobs_s = [job_s for played in rounds for job_s in played.jobs_s]
    sent = [one for played in rounds for one in played.sent]
    by_role = {role: [one for one in sent if one.role == role] for role in ROLES}
    found: dict[str, Any] = {
        **_percentiles("job", jobs_s),
        "cached_share": _cached_share(sent),
        "cached_share_by_role": {role: _cached_share(ones) for role, ones in by_role.items()},
        "read_write_by_role": {role: _read_write(ones) for role, ones in by_role.items()},
        "throughput_jobs_per_min": round(
            60 * len(jobs_s) / sum(played.span_s for played in rounds), 2
        ),
        **_percentiles("ttft", [one.ttft_s for one in sent]),
        "ttft_max_s": round(max(one.ttft_s for one in sent), 3),
        "tokens_in_per_token_out": _in_per_out(sent),
        "starved": sum(one.ttft_s > STARVED_S for one in sent),
        "jobs": len(jobs_s),
        "requests": len(sent),
    }
    return found


def by_round(ones: Sequence[Played], others: Sequence[Played]) -> Spread:
    """The median job of one arm over that of another, round by round. The jobs of two rounds are
    not alike, so a median over all of them would depend on the round that it falls into."""
    return ratio_spread([_median(one) for one in ones], [_median(one) for one in others])


def differing(arms: Mapping[str, Sequence[Played]]) -> list[str]:
    """The agents whose last answer is not the same in all arms."""
    found: set[str] = set()
    for same in zip(*arms.values(), strict=True):
        first = same[0].answers
        for other in same[1:]:
            names = first.keys() | other.answers.keys()
            found |= {name for name in names if first.get(name) != other.answers.get(name)}
    return sorted(found)


def _median(played: Played) -> float:
    return statistics.median(played.jobs_s)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles([*values, *values], n=100, method="inclusive")
    return {f"{name}_p50_s": round(cuts[49], 3), f"{name}_p99_s": round(cuts[98], 3)}


def _cached_share(sent: Sequence[Sent]) -> float | None:
    tokens = sum(one.prompt_tokens for one in sent)
    return round(sum(one.cached_tokens for one in sent) / tokens, 3) if tokens else None


def _in_per_out(sent: Sequence[Sent]) -> int | None:
    answered = sum(one.answer_tokens for one in sent)
    return round(sum(one.prompt_tokens for one in sent) / answered) if answered else None


def _read_write(sent: Sequence[Sent]) -> float | None:
    """Tokens read from the cache for each token written to it, answers included."""
    written = sum(one.prompt_tokens - one.cached_tokens + one.answer_tokens for one in sent)
    return round(sum(one.cached_tokens for one in sent) / written, 2) if written else None


_SCRIPT = "SGLEXT_CPU_SCRIPT"
_SILENT = "enable_thinking is defined and enable_thinking is false"
_THOUGHT = "loop.index0 > scan.query and (loop.last or said.thinking)"
_POOL_SHARE = 1 / 3
_LEAST_OVER_POOL = 2.0
_LEAST_PROMPTS = 1.3
_FIXED_TTL_S = 300.0
# What the balancer reckons with, too (`HOME_WAIT_S` of its admission queue).
_REAL_PREFILL_PER_S = 20_000.0
_RUNNING = 2


@dataclass(frozen=True)
class Amount:
    """How much of everything. at_once: jobs that run at the same time."""

    rounds: int
    jobs: int
    at_once: int
    shape: Shape = field(default_factory=Shape)


# In quick form: of few jobs, one that is much larger would decide how large the memory has to be.
# In full, three times as many jobs as run at once: the first ones all begin together, and no cache
# helps them.
_QUICK = Shape(calls=4, scale=1 / 16, most_times=3.0)
PLANS: dict[Size, Amount] = {
    "full": Amount(2, 48, 16, Shape(calls=6, scale=1 / 10)),
    "quick": Amount(2, 10, 10, _QUICK),
    "brief": Amount(1, 10, 10, _QUICK),
    "smallest": Amount(1, 10, 10, Shape(calls=4, scale=1 / 80)),
}


@dataclass(frozen=True)
class Arm:
    """engine: whose it is. settings: of our engine, while the arm runs. balancer: flags of the one
    that is in front of the engine; None: requests go to the engine."""

    engine: str
    settings: Mapping[str, Any] | None = None
    balancer: tuple[str, ...] | None = None


_AGING_S = EngineSettings().aging_s
_SHORT_S = _AGING_S / MOST  # no window is longer than the usual `aging_s` then
_FREE = ("--agent-hold-s", "0")
_SHORT = ("--aging-s", f"{_SHORT_S}")


def _ours(balancer: tuple[str, ...] = (), *, ttl_s: float = 0.0, aging_s: float = _AGING_S) -> Arm:
    """ttl_s: for how long each prompt is pinned."""
    return Arm("ours", {"pin_unmarked_ttl_s": ttl_s, "aging_s": aging_s}, balancer)


ARMS = {
    "stock": Arm("stock"),
    "session_radix": Arm("session_radix"),
    "fixed_ttl": _ours(_FREE, ttl_s=_FIXED_TTL_S),
    "ours": _ours(),
}
ABLATION = {
    "stock": Arm("stock"),
    "not_held": _ours(_FREE),
    "short_window": _ours(_SHORT, aging_s=_SHORT_S),
    "ours": _ours(),
}


class Trial:
    """One run on running nodes."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        balancers: Mapping[str, str],
        arms: Mapping[str, Arm],
        size: Amount,
        pool_tokens: int,
    ) -> None:
        """balancers: the address of each arm's, if it has one."""
        self._nodes = nodes
        self._balancers = balancers
        self._arms = arms
        self._size = size
        self._pool_tokens = pool_tokens
        self._versions = count(1)

    async def run(self, rounds: Sequence[Sequence[Plan]]) -> dict[str, Any]:
        """Plays all rounds and returns the figures."""
        seen: dict[str, list[Played]] = {name: [] for name in self._arms}
        async with clients() as http:
            pace = await self._measured_pace(http)
            for number, jobs in enumerate(rounds):
                for name in rotated(list(self._arms), number):
                    arm = self._arms[name]
                    node = self._nodes[arm.engine]
                    self._prepare(node, arm)
                    player = Player(
                        http,
                        self._balancers.get(name, node.engines[0]),
                        f"{name} {number}",
                        pace,
                        with_session=arm.engine == "session_radix",
                    )
                    seen[name].append(await player.play(jobs, self._size.at_once))
                    shown = arm_figures(seen[name][-1:])
                    print(f"round {number}, {name}: {json.dumps(shown)}", file=sys.stderr)
        return {**self._figures(seen), "pace": round(pace, 2)}

    async def _measured_pace(self, http: aiohttp.ClientSession) -> float:
        node = self._nodes[next(iter(self._arms.values())).engine]
        capacity = await measured(http, node.engines[0], fitted(node), _RUNNING)
        return capacity.prefill_per_s / (self._size.shape.scale * _REAL_PREFILL_PER_S)

    def _prepare(self, node: Node, arm: Arm) -> None:
        url = node.engines[0]
        requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
        if arm.settings is not None:
            version: Any = {"number": next(self._versions), "values": dict(arm.settings)}
            answer = requests.post(f"{url}/sgl_ext/settings", json=version, timeout=30)
            require(answer.ok and answer.json()["applied"], "the engine takes settings")

    def _figures(self, seen: Mapping[str, list[Played]]) -> dict[str, Any]:
        arms = {name: arm_figures(rounds) for name, rounds in seen.items()}
        faults = {
            name: [f for played in rounds for f in played.faults] for name, rounds in seen.items()
        }
        failed = {name: (len(found), found[0]) for name, found in faults.items() if found}
        require(not failed, "every request is answered whole, and as its script says", **failed)
        differ = differing(seen)
        require(not differ, "last answers are equal between the arms", agents=differ[:5])
        base = next(iter(seen))
        live = min(played.live_tokens for played in seen[base])
        over = round(live / self._pool_tokens, 2)
        precondition(over >= _LEAST_OVER_POOL, "live agents exceed the memory", over_pool=over)
        ideal = max(arm["cached_share"] for arm in arms.values())
        share = arms[base]["cached_share"]
        precondition(share < 0.9, "prompts are computed again", cached_share=share, best=ideal)
        ratios = {n: by_round(seen["ours"], rounds) for n, rounds in seen.items() if n != "ours"}
        return {
            **{f"job_p50_vs_{name}": ratio["median"] for name, ratio in ratios.items()},
            "starved": arms["ours"]["starved"],
            "by_round": ratios,
            "pool_tokens": self._pool_tokens,
            "working_set_over_pool": over,
            "jobs_at_once": self._size.at_once,
            "arms": arms,
        }


def measure(
    engines: Engines, folder: Path, size: Amount, arms: Mapping[str, Arm]
) -> dict[str, Any]:
    """Makes the jobs, starts the engines, and measures."""
    rounds = made(engines.model, size)
    jobs = [job for each in rounds for job in each]
    script = folder / "script.jsonl"
    script.write_text(script_of(jobs))
    template = folder / "template.jinja"
    template.write_text(_template(engines.model))
    live = sum(job.live_tokens for job in jobs) / len(jobs) * size.at_once
    longest = max(agent.prompt_tokens for job in jobs for agent in job.agents())
    pool_tokens = round(max(live * _POOL_SHARE, _LEAST_PROMPTS * longest))
    flags = ["--max-total-tokens", str(pool_tokens), "--chat-template", str(template)]
    # What runs holds its memory: with more at once nothing would be left to cache.
    flags += ["--max-running-requests", str(_RUNNING)]
    environment = {_SCRIPT: str(script)}
    kinds: dict[str, Any] = {
        "stock": partial(engines.stock, folder / "stock", *flags, environment=environment),
        "session_radix": partial(
            engines.stock,
            folder / "session_radix",
            *flags,
            "--enable-session-radix-cache",
            environment=environment,
        ),
        "ours": partial(engines.ours, folder / "ours", *flags, environment=environment),
    }
    wanted = dict.fromkeys(arm.engine for arm in arms.values())
    with running_arms({name: kinds[name] for name in wanted}) as nodes, ExitStack() as stack:
        balancers = {
            name: stack.enter_context(
                running_balancer(nodes[arm.engine].engines, folder / f"{name}.log", *arm.balancer)
            ).url
            for name, arm in arms.items()
            if arm.balancer is not None
        }
        return asyncio.run(Trial(nodes, balancers, arms, size, pool_tokens).run(rounds))


def made(model: Path, size: Amount) -> list[list[Plan]]:
    """The jobs of each round."""
    from tokenizers import Tokenizer  # as local_model: only with an engine

    texts, words = Texts(), 2000
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts.fit(len(tokenizer.encode(texts.words("a sample", words)).ids), words)
    found = []
    for number in range(size.rounds):
        maker = Maker(texts, size.shape, number + 1)
        found.append([maker.job() for _ in range(size.jobs)])
    return found


def _template(model: Path) -> str:
    """The model's template, which now writes the empty thinking of each answer into all prompts:
    so each prompt begins with the one before and its answer, as with a model that does not think.
    """
    text: str = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    for condition in (_SILENT, _THOUGHT):
        require(condition in text, "the template is the one that is known", missing=condition)
        text = text.replace(condition, "true")
    return text


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--ablation", action="store_true", help="compare parts of ours")
    options = parser.parse_args()
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arms = ABLATION if options.ablation else ARMS
    engines = chosen(options, "tiny")
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder:
        run("agents_jobs", lambda: measure(engines, Path(folder), PLANS[options.size], arms))


if __name__ == "__main__":
    main()
