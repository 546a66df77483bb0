"""What a process prints goes lost rather than ending it: its terminal may close, its disk fill."""

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class LossyStream:
    """A stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_output() -> None:
    """From now on this process goes on when its output cannot be written."""
    sys.stdout = cast(TextIO, LossyStream(sys.stdout))
    sys.stderr = cast(TextIO, LossyStream(sys.stderr))
