"""Verbs about a node of this machine, by its run folder: `logs` and `stop`.

The launcher holds a lock on the folder while it runs, and has written its process id there.
"""

import fcntl
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sgl_ext.cli.node import NodeError, UsageError
from sgl_ext.cli.show import console, plain

_POLL_S = 0.25
_LOCK = "lock"
Folder = Annotated[
    Path,
    typer.Option(
        "--log-dir", metavar="FOLDER", help="The node's run folder, as serve's --log-dir."
    ),
]
HERE = Path(".run")


def logs(
    process: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="An engine, such as engine-0; balancer; launcher."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="Last lines of each log.")
    ] = 20,
    folder: Folder = HERE,
) -> None:
    """Show the last lines of the logs of a node on this machine."""
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not found:
        raise NodeError(f"there are no logs in {folder}: give the node's --log-dir")
    if process is not None and process not in found:
        raise UsageError(f"logs: {process}: must be one of {', '.join(found)}")
    shown = found if process is None else {process: found[process]}
    tails = [Tail(path, f"{name}: " if len(shown) > 1 else "") for name, path in shown.items()]
    for tail in tails:
        _print(deque(tail.new_lines(), lines))
    while follow:
        time.sleep(_POLL_S)
        for tail in tails:
            _print(tail.new_lines())


def _print(lines: Iterator[str] | deque[str]) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()


class Tail:
    """A log that is read as it grows, over its rotation and a new start."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path = path
        self._prefix = prefix
        self._inode = -1
        self._position = 0

    def new_lines(self) -> Iterator[str]:
        """The whole lines since the last call, as a terminal may show them."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            now = os.fstat(file.fileno())
            # A new start makes a new file. A rotation empties the file in place.
            if now.st_ino != self._inode or now.st_size < self._position:
                self._inode, self._position = now.st_ino, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                text = line.decode(errors="replace").expandtabs().rstrip("\r\n")
                yield self._prefix + plain(text)


def stop(
    wait: Annotated[bool, typer.Option(help="Wait until the node has ended.")] = True,
    folder: Folder = HERE,
) -> None:
    """Stop a node on this machine. Its running requests have drain-s to finish."""
    process = node_process(folder)
    if process is None:
        raise NodeError(f"no node runs with the run folder {folder}: give the node's --log-dir")
    try:
        os.kill(process, signal.SIGTERM)
    except PermissionError:
        raise NodeError(f"process {process} belongs to another user: use sudo") from None
    while wait and node_process(folder) == process:
        time.sleep(_POLL_S)
    console().print(f"process {process} {'has ended' if wait else 'stops'}")


def node_process(folder: Path) -> int | None:
    """The process id of the launcher that uses a run folder; None if none does.

    Raises NodeError if this user may not read it.
    """
    try:
        with (folder / _LOCK).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = lock.read(20)
                return int(text) if text.isdigit() else None
    except FileNotFoundError:
        return None
    except PermissionError:
        raise NodeError(f"{folder} belongs to another user: use sudo") from None
    return None
