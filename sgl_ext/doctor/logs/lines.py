"""Reads a request log line by line."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Read = TypeVar("Read")


class NotALog(Exception):
    """No line has the fields of a request log; the message says so."""

    def __init__(self) -> None:
        super().__init__("not a request log: no line has the fields of one")


def readable(lines: Iterable[bytes], read: Callable[[bytes], Read], command: str) -> Iterator[Read]:
    """What `read` makes of each line.

    Lines for which it raises ValueError, TypeError, KeyError or AttributeError are left out, and
    their number is printed on stderr in the name of the command. Raises NotALog if none is left.
    """
    count = unreadable = 0
    for line in lines:
        try:
            entry = read(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            unreadable += 1
        else:
            count += 1
            yield entry
    if unreadable and not count:
        raise NotALog
    if unreadable:
        print(f"{command}: {unreadable} lines could not be read", file=sys.stderr)
