"""Finds the last line with a given beginning in files that may be large, within a time.

It reads backwards, as those who look for a request mostly look for a late one. Blocks are small, so
that a search in a thread leaves the interpreter to others between them.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

_BLOCK_BYTES = 256 * 1024
# Longer lines are not read to their end.
_MAX_LINE_BYTES = 64 * 1024


class SearchTooLong(Exception):
    """The time is over, and the line was not found."""


def find_last_line(
    paths: Sequence[Path], start: bytes, deadline_s: float, clock: Callable[[], float]
) -> bytes | None:
    """The last line that begins with `start` in the first of these files that has one; None if none
    has. Raises SearchTooLong."""
    with ExitStack() as stack:
        files = []
        for path in paths:  # open before the search, so that no file is renamed between two
            with suppress(FileNotFoundError):
                files.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                stack.callback(os.close, files[-1])
        for file in files:
            if (line := _find_in(file, start, deadline_s, clock)) is not None:
                return line
    return None


def _find_in(
    file: int, start: bytes, deadline_s: float, clock: Callable[[], float]
) -> bytes | None:
    mark, next_bytes, end = b"\n" + start, b"", os.fstat(file).st_size
    while end > 0:
        if clock() > deadline_s:
            raise SearchTooLong
        begin = max(end - _BLOCK_BYTES, 0)
        block = os.pread(file, end - begin, begin)
        text = block + next_bytes
        if (found := text.rfind(mark)) >= 0:
            return _line_at(file, begin + found + 1)
        if not begin and text.startswith(start):
            return _line_at(file, 0)
        next_bytes, end = text[: len(mark) - 1], begin
    return None


def _line_at(file: int, offset: int) -> bytes | None:
    """The line there; None if it is not complete."""
    line, is_whole, _ = os.pread(file, _MAX_LINE_BYTES, offset).partition(b"\n")
    return line if is_whole else None
