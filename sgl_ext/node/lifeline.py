"""A child that outlives its launcher by nothing: it holds a pipe, and the pipe's end is its own.

The launcher gives each child one end of a pipe as standard input and never
writes. However the launcher ends, kill -9 included, the system closes its end
and the child's read returns.
"""

from __future__ import annotations

import os
import sys
import threading

VARIABLE = "SGL_EXT_LIFELINE"


def end_with_parent() -> None:
    """Ends this process when standard input closes, if its launcher asked for that."""
    if os.environ.pop(VARIABLE, None) is None:
        return

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
