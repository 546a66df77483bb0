"""How many tokens a second does our engine decode, over stock SGLang, with 8 and 32 streams?"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from bench.lib.capacity import measured
from bench.lib.clients import clients
from bench.lib.engines import Engines, chosen, engine_parser
from bench.lib.script import run
from bench.lib.texts import fitted
from bench.lib.throughput import compared

_STREAMS = (8, 32)
_ROUNDS = {"brief": 5, "smallest": 1}


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    engines, rounds = chosen(options, "tiny"), _ROUNDS.get(options.size, 9)
    run("decoding", lambda: asyncio.run(measure(engines, rounds)))


async def measure(engines: Engines, rounds: int) -> dict[str, Any]:
    """Tokens a second of both engines, by the number of streams."""
    nodes = {name: engines.running_node(name) for name in ("stock", "ours")}
    urls = {name: node.engines[0] for name, node in nodes.items()}
    texts, found = fitted(nodes["stock"]), dict[str, Any]()
    async with clients() as http:
        for streams in _STREAMS:
            capacity = await measured(http, urls["stock"], texts, streams)
            streams = min(streams, capacity.slots)
            found[str(streams)] = await compared(
                http, urls, texts, replace(capacity, streams=streams), rounds
            )
    return {"by_streams": found}


if __name__ == "__main__":
    main()
