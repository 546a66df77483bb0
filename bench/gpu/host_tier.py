"""Does a pin that spills to the host come back with the keys and values it left with?

Prompts that are together twice as large as the device's cache are sent one after the other, with
deterministic kernels, to stock SGLang and to our engine, both with HiCache. Ours pins each. Then
their next turns come in the same order, so that each was evicted in the meantime. `differing`
counts answers that differ from those of stock SGLang to the same turns with an empty cache. A wrong
key or value in a page that was loaded from the host would change an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sgl_ext_cpu.node import Node

from bench.gpu.equality import one_by_one, pinned
from bench.lib.clients import clients
from bench.lib.engines import chosen, engine_parser, pool_tokens
from bench.lib.generate import Answer, Request
from bench.lib.script import require, run
from bench.lib.texts import fitted

_PROMPTS, _POOLS, _ANSWER_TOKENS = 16, 2, 48
_NEXT_TURN = "And what comes after all of this?"
_MOVES = ("sgl_ext_pins_spilled_total", "sgl_ext_pins_loaded_total")
_FROM_HOST = 'sgl_ext_cached_tokens_total{tier="host"}'


def main() -> None:
    engines = chosen(engine_parser(__doc__).parse_args(), "tiny")
    nodes = {name: engines.running_node(name) for name in ("stock", "ours")}
    run("host_tier", lambda: asyncio.run(measure(nodes)))


async def measure(nodes: Mapping[str, Node]) -> dict[str, Any]:
    """The answers of both engines, cold and from the host, compared."""
    texts = fitted(nodes["stock"])
    each = _POOLS * pool_tokens(nodes["stock"]) // _PROMPTS
    requests = [
        Request(texts.fresh(f"Prefix {number}", each), _ANSWER_TOKENS) for number in range(_PROMPTS)
    ]
    turns = [replace(one, text=f"{one.text} {_NEXT_TURN}") for one in requests]
    seen: dict[str, Sequence[Answer]] = {}
    async with clients() as http:
        for turn in turns:
            seen["cold"] = [*seen.get("cold", ()), *await one_by_one(http, nodes["stock"], [turn])]
        for name, node in nodes.items():
            is_ours = name == "ours"
            await one_by_one(http, node, list(map(pinned, requests)) if is_ours else requests)
            sent = list(map(pinned, turns)) if is_ours else turns
            seen[name] = await one_by_one(http, node, sent, is_cold=False)
    moved = {name: nodes["ours"].metric(name) for name in _MOVES}
    from_host = nodes["ours"].metric(_FROM_HOST)
    return compared(seen, moved, from_host)


def compared(
    seen: Mapping[str, Sequence[Answer]], moved: Mapping[str, float], from_host: float
) -> dict[str, Any]:
    """The figures. Raises InvariantBroken if nothing came from the host, or an answer differs."""
    cut = {name: sum(one.ended_s is None for one in answers) for name, answers in seen.items()}
    require(not any(cut.values()), "every request is answered whole", failed=cut)
    require(all(moved.values()), "pins spill and come back", **moved)
    require(from_host > 0, "requests find tokens on the host")
    cold = seen["cold"]
    differing = {
        name: sum(
            one.output_ids != other.output_ids for one, other in zip(cold, seen[name], strict=True)
        )
        for name in ("stock", "ours")
    }
    figures = {
        "prompts": len(cold),
        "prompt_tokens": sum(one.prompt_tokens for one in cold),
        "differing": differing,
        "moved": dict(moved),
        "tokens_from_host": from_host,
    }
    is_fine = not differing["ours"] or differing["stock"] > 0
    require(is_fine, "our answers equal those without a cache, or stock's differ too", **figures)
    return figures


if __name__ == "__main__":
    main()
