"""How a launcher stops its processes, and what it does without its terminal."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from typing import IO, cast

from rich.console import Console

from sgl_ext.launch import drain
from sgl_ext.node.child import Child
from sgl_ext.process import LossyStream
from tests.waiting import HANG_S

# A process that ends at the second SIGTERM.
DRAINS = """
import signal, sys
seen = []
def terminated(*_):
    print("signal", flush=True)
    seen.append(1) if not seen else sys.exit(0)
signal.signal(signal.SIGTERM, terminated)
print("ready", flush=True)
while True:
    signal.pause()
"""


async def started(name: str, folder: Path) -> Child:
    child = Child(name, [sys.executable, "-c", DRAINS], {}, folder / name, "http://127.0.0.1:1")
    await child.start()
    await until(child, "ready")
    return child


async def until(child: Child, line: str) -> None:
    """Returns once the child's log ends with the line."""
    async with asyncio.timeout(HANG_S):
        while child.last_lines(1) != [line]:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.01)


async def test_a_second_signal_ends_a_node_that_drains_and_says_so(tmp_path: Path) -> None:
    balancer, engine = [await started(name, tmp_path) for name in ("balancer", "engine-0")]
    printed: list[str] = []
    hurry = asyncio.Event()
    draining = asyncio.create_task(drain(600, [engine], balancer, printed.append, hurry))
    await until(balancer, "signal")
    assert (balancer.exit_code, engine.exit_code) == (None, None)
    hurry.set()
    async with asyncio.timeout(HANG_S):
        await draining
    assert balancer.exit_code == 0
    assert engine.exit_code is not None
    assert printed[0].startswith("stopping; running requests have 600 s to finish")
    assert printed[1:] == ["second signal: ending at once"]


def test_a_node_prints_on_without_its_terminal() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("Input/output error")

        def flush(self) -> None:
            raise OSError("Input/output error")

    console = Console(file=cast(IO[str], LossyStream(Gone())))
    console.print("engine-0 ended and restarts")
