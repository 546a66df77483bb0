"""SIGHUP ends nothing: a terminal that closes sends it, and operators do, to have settings read.

The signal is blocked, and a thread waits for it. A handler would not be inherited by programs that
the process starts, and they would end; that a signal is blocked and ignored is inherited.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType

_HANGUP = {signal.SIGHUP}


def hold_hangups() -> None:
    """From now on SIGHUP ends neither this process nor those that it starts. Call it before there
    are other threads."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANGUP)


def on_hangup(call: Callable[[], object]) -> None:
    """Calls `call` at each SIGHUP that is held, in a thread, until it raises RuntimeError, as an
    event loop that is closed does."""

    def wait() -> None:
        try:
            while True:
                signal.sigwait(_HANGUP)
                call()
        except RuntimeError:
            return

    threading.Thread(target=wait, name="hangups", daemon=True).start()


def handle_hangups(handle: Callable[[int, FrameType | None], object]) -> None:
    """Calls `handle` at each SIGHUP in the main thread: for a process that only forks."""
    signal.signal(signal.SIGHUP, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANGUP)
