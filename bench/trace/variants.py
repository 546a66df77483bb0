"""Makes a trace by the name of its variant."""

from __future__ import annotations

from bench.trace import harness, published, swarm
from bench.trace.agents import Agent, TraceConfig
from bench.trace.mooncake import read_trace

MOONCAKE = "mooncake"
SHAPES = (*swarm.VARIANTS, *harness.VARIANTS, *published.VARIANTS)
"""Variants that are generated."""


def make_trace(config: TraceConfig) -> tuple[Agent, ...]:
    """The agents of a trace; an agent's number is its place.

    Raises ValueError for an unknown variant, or for a file that is no trace.
    """
    if config.variant in swarm.VARIANTS:
        return swarm.make_swarm(config)
    if config.variant in harness.VARIANTS:
        return harness.make_harness(config)
    if config.variant in published.VARIANTS:
        return published.make_published(config)
    if config.variant == MOONCAKE:
        return read_trace(config)
    raise ValueError(f"variant: {config.variant!r} is none of {(*SHAPES, MOONCAKE)}")
