"""`sgl-ext top`: a node's state in a terminal, live.

thread: GET /sgl_ext/live, again after each failure --> Feed --> the loop: keys, size, screen
"""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from sgl_ext.cli.node import Node, NodeError, UsageError, node_at
from sgl_ext.cli.options import HERE, Key, Url
from sgl_ext.cli.show import console
from sgl_ext.cli.state import LIVE, STATE, State, read_state

_TICK_S = 0.2
_RETRY_S = 1.0
_QUIT = b"qQ\x03\x04"


class Feed:
    """The latest state of a node, kept by a thread.

    note: what is wrong with the connection; None while it is live.
    """

    def __init__(self, node: Node, first: State) -> None:
        self.state = first
        self.note: str | None = None
        self._node = node

    def follow(self) -> None:
        """Reads the node's stream, again and again."""
        while True:
            try:
                for document in self._node.events(LIVE):
                    self.state, self.note = read_state(document, self._node), None
                self.note = f"{self._node.url} ended the stream; connecting again"
            except NodeError as error:
                self.note = str(error)
            time.sleep(_RETRY_S)


def top(url: Url = HERE, key: Key = None) -> None:
    """Show a node live: engines, queue, cache, sessions, pins, tenants. q quits."""
    from rich.live import Live

    from sgl_ext.cli.dashboard import dashboard

    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise UsageError("top: needs a terminal; for programs there is sgl-ext status --json")
    node = node_at(url, key)
    feed = Feed(node, read_state(node.get(STATE), node))
    shown = console()
    Thread(target=feed.follow, daemon=True).start()
    last: object = None
    with _keys() as pressed, Live(console=shown, screen=True, auto_refresh=False) as live:
        while not pressed(_TICK_S):
            size = os.get_terminal_size()
            now = (feed.state, feed.note, size)
            if now != last:
                shown.size = size
                live.update(dashboard(feed.state, node.url, feed.note, *size), refresh=True)
                last = now


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits for a key and says whether it quits.

    The terminal does not echo meanwhile, and is left as it was, whatever ends this.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    def pressed(timeout_s: float) -> bool:
        readable, _, _ = select.select([terminal], [], [], timeout_s)
        read = os.read(terminal, 64) if readable else None
        return read is not None and (not read or any(key in _QUIT for key in read))

    # A stopped program would leave the terminal to the shell as it is here.
    earlier = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    earlier[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        tty.setcbreak(terminal)
        with suppress(KeyboardInterrupt):
            yield pressed
    finally:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        for number, handler in earlier.items():
            signal.signal(number, handler)
