"""The options with which a bench takes a trace, the same for all benches.

--shape NAME    sessions that are generated, see bench/trace/variants.py
--trace FILE    a trace in Mooncake's format
--sessions, --seed, --scale, --pace    more of the trace
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from bench.trace.agents import TraceConfig
from bench.trace.variants import MOONCAKE, SHAPES

_FURTHER = ("sessions", "seed", "scale", "pace")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options; `trace_of` reads them."""
    group = parser.add_argument_group("trace")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--shape", choices=SHAPES, help="generate sessions of this shape")
    kind.add_argument("--trace", metavar="FILE", help="read a trace in Mooncake's format")
    group.add_argument("--sessions", type=_positive(int), help="how many conversations at most")
    group.add_argument("--seed", type=int, help="decides a generated trace")
    group.add_argument("--scale", type=_positive(float), help="multiplies sizes in tokens")
    group.add_argument("--pace", type=_positive(float), help="divides pauses and times")


def trace_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, default: TraceConfig
) -> TraceConfig | None:
    """The trace that the options ask for; None if they name neither a shape nor a file.

    What they leave open is as in `default`. Ends the program if an option says more of a trace
    that is not there.
    """
    given = {name: getattr(options, name) for name in _FURTHER}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.shape is None and options.trace is None:
        if changed:
            parser.error(f"--{next(iter(changed))} needs --shape or --trace")
        return None
    return replace(default, variant=options.shape or MOONCAKE, file=options.trace, **changed)


def _positive(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError(text)
        return value

    read.__name__ = f"positive {kind.__name__}"
    return read
