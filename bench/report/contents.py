"""The sections of the page: the question of each, in plain words, and where its tables are from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bench.report import balancer_tables, engine_tables, fleet_tables
from bench.report.pictures import Picture
from bench.report.tables import Figures, Table


def _none(_: Figures) -> Iterable[Picture]:
    return ()


@dataclass(frozen=True)
class Section:
    """A part of the page. step: of the plan. page: the feature's; "": none."""

    step: str
    title: str
    text: str
    tables: Callable[[Figures], Iterator[Table]]
    page: str
    pictures: Callable[[Figures], Iterable[Picture]] = _none


SECTIONS = (
    Section(
        "recorded",
        "Recorded sessions",
        "Sessions of Claude Code as people had them (the public repository "
        "callanjfox/kv-cache-tester; 142 of 710, by which nothing was chosen), in a closed loop on "
        "simulated engines in virtual time: 1.5 million tokens of memory, 40,000 tokens of "
        "prefill a second. The balancer's router and queue, the engines' order and their pins are "
        "the project's own; of other routers the policy. A turn is within the level if its first "
        "token comes in the time that computing the mean prompt takes twice, and its stream has a "
        "fifth of a lone one's speed. Agents are those at which 95% of turns are, on one engine by "
        "the mean of three runs with other seeds; "
        "64 an engine is the most that was measured. Host memory is "
        "twice the device's. The last table is of two real engines on this CPU, with prompts that "
        "are a small part of the recorded size.",
        fleet_tables.recorded,
        "guide/priority.md",
        fleet_tables.recorded_pictures,
    ),
    Section(
        "warm_turn",
        "A turn whose prefix is cached",
        "A conversation grows by a few words a turn. Host time is TTFT without the model's "
        "forward pass: what a GPU would not make faster.",
        engine_tables.warm_turn,
        "how/engine.md",
    ),
    Section(
        "header_strip",
        "A header that changes, at token 0",
        "Prompts have Claude Code's billing line, which changes with each request. Our engine "
        "removes it. SGLang is measured without it, too.",
        engine_tables.header_strip,
        "how/strip.md",
    ),
    Section(
        "pin_flood",
        "A pinned prefix under a flood",
        "Between two turns of a session come other prompts that are together larger than the "
        "cache. The share is of what the session's previous turn left in the cache.",
        engine_tables.pin_flood,
        "guide/pins.md",
    ),
    Section(
        "compaction",
        "A full context that its client compacts",
        "An agent reads files until its client asks for a summary, as Claude Code and Codex do, "
        "and begins again with it.",
        engine_tables.compaction,
        "guide/clients.md",
    ),
    Section(
        "restarts",
        "Restarts",
        "Two engines with sessions restart one by one. Then every process is killed at a moment by "
        "chance, and started again; a long prompt is sent again, and answers are compared.",
        engine_tables.restarts,
        "guide/pins.md",
    ),
    Section(
        "restarts_day",
        "A day of recorded sessions with restarts",
        "Twenty recorded sessions at once on two engines, about a sixteenth as long, with two "
        "rolling restarts and, between them, a kill of every process. The cached share is of what "
        "a turn has in common with the one before it.",
        engine_tables.restarts_day,
        "guide/pins.md",
    ),
    Section(
        "priority",
        "Interactive requests beside a batch",
        "A batch that is more than the engine holds runs, and interactive requests come one "
        "by one. The first load uses up the request slots, the second the KV memory.",
        engine_tables.priority,
        "guide/priority.md",
    ),
    Section(
        "speculative_prefill",
        "The next turn, prefilled ahead",
        "While a person thinks, the engine prefills the part of the next prompt that is "
        "known. In one arm the client sends what it knows as a request of its own.",
        engine_tables.speculative_prefill,
        "guide/prefill.md",
    ),
    Section(
        "decode",
        "Drafts from what the agent has read",
        "A scripted agent reads files of this repository, edits them by quoting, and sometimes "
        "writes one whole. SGLang is measured without drafts: its n-grams do not start on a CPU.",
        engine_tables.decode,
        "guide/operations.md",
    ),
    Section(
        "fanout",
        "Sub-agents that start together",
        "Eight requests with the same cold prefix arrive at one engine at the same time.",
        engine_tables.fanout,
        "how/engine.md",
    ),
    Section(
        "judges",
        "Load generators of other projects",
        "Each load generator sends the same work to two engines behind our balancer, to two "
        "stock engines in turn, and to these behind a router. The figures are the judges' "
        "own.",
        balancer_tables.judges,
        "how/measuring.md",
    ),
    Section(
        "routing",
        "Routers: a team of agents",
        "The same trace through each router to the same simulated engines. Engines behind "
        "sgl-ext publish events and take their queues in our order; the others are stock "
        "engines. vllm-router alone gets a session header, which its policy needs.",
        balancer_tables.routing,
        "how/routing.md",
    ),
    Section(
        "proxy",
        "What a proxy costs",
        "One worker answers at once, and each proxy in front of it runs on one core. nginx "
        "reads no body: it shows what plain forwarding costs.",
        balancer_tables.proxy,
        "how/routing.md",
    ),
    Section(
        "proxy_profile",
        "Where a request's time goes in the balancer",
        "CPU time of each step of a request in the balancer's process.",
        balancer_tables.proxy_profile,
        "how/routing.md",
    ),
    Section(
        "index",
        "Time of a routing decision",
        "How long it takes to find which engines hold a prompt's prefix, and to choose one. "
        "Dynamo's whole decision has no lookup in it, as its own index is empty here.",
        balancer_tables.index,
        "how/prefix-index.md",
    ),
    Section(
        "tool_loop",
        "A loop of tool calls",
        "A client makes 20 calls: with the whole conversation each time, with stored turns, "
        "and over a WebSocket. The engine answers at once.",
        balancer_tables.tool_loop,
        "guide/contexts.md",
    ),
    Section(
        "gpu",
        "On a GPU",
        "The steps of `make gpu-report` on this machine's GPU.",
        engine_tables.gpu,
        "how/measuring.md",
    ),
)
