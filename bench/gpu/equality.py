"""Does our engine give the tokens that SGLang gives, with pins and with preemption?

The same prompts go to stock SGLang and to our engine, greedily:

    stock             one after the other
    stock again       the same, for the kernels against themselves
    stock, crowded    at once, with priorities by which SGLang preempts for slots
    ours              one after the other; each prompt is pinned
    ours, crowded     at once, beside the pins, with priorities by which our engine preempts

`differing` counts the answers that differ from the first arm's. Kernels add numbers in an order
that can depend on what else is in the batch. Then an answer may differ, in stock SGLang too, and
`stock, crowded` shows it. So an answer of ours may differ only where stock differs from itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.engines import chosen, engine_parser
from bench.lib.generate import Answer, Load, Request, ask, play
from bench.lib.script import Size, require, run
from bench.lib.texts import fitted

_PIN = {"cache_control": {"type": "ephemeral", "ttl": "600s"}}
_LOADS: dict[Size, Load] = {
    "full": Load(20, (400, 128), (600, 32), (0.15, 0.25, 0.35, 0.45, 0.55)),
    "smallest": Load(12, (200, 24), (300, 8), (0.15, 0.3, 0.45)),
}
_FIRST = "stock"


@dataclass(frozen=True)
class PinnedRequest(Request):
    """A request whose whole prompt is pinned."""

    @property
    def body(self) -> dict[str, Any]:
        return {**super().body, "nvext": _PIN}


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    engines = chosen(options, "tiny")
    load = _LOADS["smallest" if options.size == "smallest" else "full"]
    nodes = {
        "stock": engines.running_node("stock_priority", "stock"),
        "ours": engines.running_node("ours"),
    }
    run("equality", lambda: asyncio.run(measure(nodes, load)))


async def measure(nodes: Mapping[str, Node], load: Load) -> dict[str, Any]:
    """The answers of all arms, compared. Raises InvariantBroken if ours differ unexplained."""
    texts = fitted(nodes["stock"])
    stock, ours = (nodes[name] for name in ("stock", "ours"))
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await one_by_one(http, stock, load.requests(texts, "Warm-up")[-2:])
        await one_by_one(http, ours, load.requests(texts, "Warm-up")[-2:])
        batch = replace(load, offsets=()).requests(texts, "Calibration")
        alone = await play(http, stock.engines[0], batch)
        batch_s = max(answer.ended_s or 0.0 for answer in alone)
        requests = load.requests(texts, "Equality", batch_s)
        seen = {
            _FIRST: await one_by_one(http, stock, requests),
            "stock again": await one_by_one(http, stock, requests),
            "stock, crowded": await at_once(http, stock, requests),
            "ours": await one_by_one(http, ours, list(map(pinned, requests))),
        }
        async with http.get(f"{ours.engines[0]}/v1/pins") as answer:
            pins = (await answer.json())["pins"]
        seen["ours, crowded"] = await play(http, ours.engines[0], list(map(pinned, requests)))
    return compared(seen, sum(pin["tokens"] for pin in pins))


async def one_by_one(
    http: aiohttp.ClientSession,
    node: Node,
    requests: Sequence[Request],
    *,
    is_cold: bool = True,
) -> list[Answer]:
    """The answers to each request by itself, with an empty cache before the first if it is cold."""
    if is_cold:
        node.flush()
    url = node.engines[0]
    return [await ask(http, url, replace(request, at_s=0.0), 0.0) for request in requests]


async def at_once(
    http: aiohttp.ClientSession, node: Node, requests: Sequence[Request]
) -> list[Answer]:
    """The answers to all requests, each sent at its time, with an empty cache before."""
    node.flush()
    return await play(http, node.engines[0], requests)


def pinned(request: Request) -> PinnedRequest:
    return PinnedRequest(request.text, request.answer_tokens, request.priority, request.at_s)


def compared(seen: Mapping[str, Sequence[Answer]], pinned_tokens: int) -> dict[str, Any]:
    """The figures. Raises InvariantBroken if the engines did not do what is to be compared."""
    cut = {name: sum(one.ended_s is None for one in answers) for name, answers in seen.items()}
    require(not any(cut.values()), "every request is answered whole", failed=cut)
    preempted = {name: sum(one.preempted for one in answers) for name, answers in seen.items()}
    require(preempted["ours, crowded"] > 0, "our engine preempts")
    require(pinned_tokens > 0, "our engine has pins")
    first = seen[_FIRST]
    differing = {
        name: sum(
            one.output_ids != other.output_ids for one, other in zip(first, answers, strict=True)
        )
        for name, answers in seen.items()
        if name != _FIRST
    }
    found = {
        "prompts": len(first),
        "tokens": sum(len(answer.output_ids) for answer in first),
        "differing": differing,
        "first_difference": first_difference(seen),
        "preempted": preempted,
        "pinned_tokens": pinned_tokens,
        "explanation": explanation(differing),
    }
    require(not unexplained(differing), "our answers equal stock's", **found)
    return found


def unexplained(differing: Mapping[str, int]) -> list[str]:
    """The arms of ours that differ where stock, asked alike, does not differ from itself."""
    alike = {"ours": "stock again", "ours, crowded": "stock, crowded"}
    return [
        ours for ours, stock in alike.items() if differing[ours] and not differing[stock]
    ]  # fmt: skip


def explanation(differing: Mapping[str, int]) -> str:
    """What the counts mean, in one sentence."""
    if not any(differing.values()):
        return "All answers are equal, token for token."
    if unexplained(differing):
        return "Answers of ours differ where stock SGLang's do not differ from each other."
    if differing["stock again"]:
        return (
            "Stock SGLang's answers to the same requests differ from each other: its kernels are "
            "not deterministic here, so that equality cannot be judged."
        )
    return (
        "One after the other, all answers are equal. In a batch some differ, of stock SGLang too: "
        "its kernels depend on the batch. The step with deterministic kernels judges these."
    )


def first_difference(seen: Mapping[str, Sequence[Answer]]) -> dict[str, int]:
    """The earliest place, in tokens, at which an answer of an arm differs."""
    found = {}
    for name, answers in seen.items():
        places = [
            _place(one.output_ids, other.output_ids)
            for one, other in zip(seen[_FIRST], answers, strict=True)
            if one.output_ids != other.output_ids
        ]
        if places:
            found[name] = min(places)
    return found


def _place(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), len(ids))


if __name__ == "__main__":
    main()
