"""What all bench scripts share: their command line, their last line, and their invariants."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

Size = Literal["full", "quick", "brief", "smallest"]


class InvariantBroken(Exception):
    """The figures of a run mean nothing, because this did not hold."""


def require(condition: bool, invariant: str, **details: object) -> None:
    """Raises InvariantBroken, which names the invariant, unless the condition holds."""
    if not condition:
        values = ", ".join(f"{name}={value}" for name, value in details.items())
        raise InvariantBroken(f"{invariant} ({values})" if values else invariant)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of every bench; `size` is a `Size`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        default="full",
        help="less of everything, within five minutes",
    )
    # For tests: the figures of so short a run mean little, its invariants hold all the same.
    sizes.add_argument(
        "--smallest", dest="size", action="store_const", const="smallest", help=argparse.SUPPRESS
    )
    return parser


def run(name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
    """Measures, and prints the figures as one JSON object, the last line.

    Exits with status 1 and the broken invariant on stderr if one is broken.
    """
    try:
        figures = measure()
    except InvariantBroken as broken:
        sys.exit(f"bench.{name}: broken invariant: {broken}")
    print(json.dumps({"bench": name, **figures}))
