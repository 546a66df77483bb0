"""What a process prints goes lost rather than ending it or holding it up: its terminal may close
or be stopped, its disk fill, and nobody read the pipe."""

import select
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


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
