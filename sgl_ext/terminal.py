"""A process outlives its terminal: SIGHUP does not end it, nor does output that nobody reads.

A terminal that closes sends SIGHUP, and operators do, to have settings read. The signal is blocked,
and a thread waits for it. A handler would not be inherited by programs that the process starts, and
they would end; that a signal is blocked and ignored is inherited.

What a process prints is lost rather than ending it or holding it up: its terminal may close or be
stopped, its disk fill, and nobody read the pipe.
"""

import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO, cast

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


class LossyStream:
    """A stream that drops what cannot be written now."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            if self._takes_more():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            if self._takes_more():
                self._stream.flush()

    def _takes_more(self) -> bool:
        """Whether a write would not wait. What is no file of the system never waits."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return True
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        return bool(ready.poll(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_output() -> None:
    """From now on this process goes on when its output cannot be written."""
    sys.stdout = cast(TextIO, LossyStream(sys.stdout))
    sys.stderr = cast(TextIO, LossyStream(sys.stderr))
