"""What a run needs: a node that serves, its agents, and the right answers."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from sgl_ext_cpu.node import local_model

from bench.agents.conversations import Conversation
from bench.agents.oracle import Oracle, ask_stock, from_nursery
from bench.faults.target import Target
from bench.lib.pin_load import Texts
from bench.lib.stock_engine import stock_engine
from bench.trace.agents import TraceConfig
from bench.trace.variants import make_trace


@dataclass(frozen=True)
class Stage:
    """A node without load."""

    target: Target
    oracle: Oracle
    agents: list[Conversation]


TRACE = TraceConfig(sessions=200, scale=0.002)
"""What of a trace an engine's memory holds: a long history fills most of it."""


def set_up(
    stack: ExitStack,
    agents: int,
    turns: int,
    trace: TraceConfig | None = None,
    *,
    has_small_disks: bool = True,
) -> Stage:
    """Starts a node, which ends with the stack, and asks a stock engine for the right answers
    to so many agents' turns, of a trace or made up. Raises RuntimeError if a server does not come
    up."""
    model = local_model("tiny")
    traced = make_trace(trace)[:agents] if trace else [None] * agents
    conversations = [
        Conversation(n, turns, model.name, Texts(), agent) for n, agent in enumerate(traced)
    ]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-ext-bench-")))
    environment = from_nursery(stack)
    target = Target(model, folder / "node", environment, has_small_disks=has_small_disks)
    stack.enter_context(closing(target))
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(target.start)
        with stock_engine(model, folder / "stock", environment=environment) as stock:
            oracle = asyncio.run(ask_stock(stock.url, conversations))
        starting.result()
    return Stage(target, oracle, conversations)
