"""Ends a child process when its launcher ends, even after kill -9.

The launcher gives each child one end of a pipe as standard input and never writes to it. When
the launcher ends, the system closes the other end, and the child's read returns.
"""

import os
import sys
import threading

VARIABLE = "SGLEXT_LIFELINE"


def end_with_parent() -> None:
    """Ends this process when standard input closes, if a launcher started it."""
    if os.environ.pop(VARIABLE, None) is None:
        return

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
