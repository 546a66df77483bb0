"""What all bench scripts share: their command line, their last line, and their invariants."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

Size = Literal["full", "quick", "brief", "smallest"]
NOT_VALID = 3
"""The exit status of a bench that could not make what it wanted to measure."""


class InvariantBroken(Exception):
    """The figures of a run mean nothing, because this did not hold."""


class NotValid(InvariantBroken):
    """Nothing went wrong, but the load was not the one that the bench is about."""


def require(condition: bool, invariant: str, **details: object) -> None:
    """Raises InvariantBroken, which names the invariant, unless the condition holds."""
    if not condition:
        raise InvariantBroken(_detailed(invariant, details))


def precondition(condition: bool, wanted: str, **details: object) -> None:
    """Raises NotValid, which names what was wanted, unless the condition holds: an engine past
    its capacity, a flood larger than the cache, more sessions than the memory holds."""
    if not condition:
        raise NotValid(_detailed(wanted, details))


def _detailed(text: str, details: Mapping[str, object]) -> str:
    values = ", ".join(f"{name}={value}" for name, value in details.items())
    return f"{text} ({values})" if values else text


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

    Exits with status 1 and the broken invariant on stderr if one is broken, and with status
    NOT_VALID and what was wanted if a precondition did not hold.
    """
    try:
        figures = measure()
    except NotValid as missed:
        print(f"bench.{name}: not valid: {missed}", file=sys.stderr)
        sys.exit(NOT_VALID)
    except InvariantBroken as broken:
        sys.exit(f"bench.{name}: broken invariant: {broken}")
    print(json.dumps({"bench": name, **figures}))
