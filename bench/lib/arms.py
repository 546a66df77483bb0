"""The arms of a comparison: nodes that are started at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from sgl_ext_cpu.node import Node

T = TypeVar("T")


@contextmanager
def running_arms(
    starts: Mapping[str, Callable[[], AbstractContextManager[Node]]],
) -> Iterator[dict[str, Node]]:
    """The started node of each arm, by its name. Raises the error of one that does not start."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = {
            name: pool.submit(lambda start: stack.enter_context(start()), start)
            for name, start in starts.items()
        }
        yield {name: node.result() for name, node in starting.items()}


def rotated(arms: Sequence[T], number: int) -> list[T]:
    """The arms in the order of round `number`, in which each begins in its turn."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]
