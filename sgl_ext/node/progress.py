"""What the launcher prints: the progress of each engine, then how to connect a client."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from sgl_ext.node.child import READY, Child, stage_of
from sgl_ext.settings.schema import LaunchSettings

_UNTRIED = "waiting for the balancer's probe"
"""The stage of a child that says it is ready before the balancer does."""


@contextmanager
def start_progress(
    console: Console, children: Sequence[Child], clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[set[str]], None]]:
    """Gives a function that shows each child's stage, "ready" for those whose names it gets, and
    once what an engine's log says for the operator.

    On a terminal the stages are shown live, elsewhere as a line for each change.
    """
    shown: dict[str, str] = {}
    said: set[str] = set()
    begun_s = clock()
    with Live(console=console, transient=True) if console.is_terminal else nullcontext() as live:

        def show(ready: set[str]) -> None:
            passed = f"{clock() - begun_s:4.0f} s"
            table = Table.grid(padding=(0, 2))
            for child in children:
                stage, done = stage_of(child)
                for note in child.start_log.notes.keys() - said:
                    said.add(note)
                    console.print(f"{child.name}: {note}", highlight=False, markup=False)
                stage = READY if child.name in ready else _UNTRIED if stage == READY else stage
                percent = "" if done is None or stage == READY else f" {done:.0%}"
                table.add_row(passed, child.name, stage + percent)
                # Elsewhere than on a terminal, ten lines for the weights are enough.
                seen = f"{stage} {'' if done is None else int(done * 10)}"
                if live is None and shown.get(child.name) != seen:
                    console.print(f"{passed}  {child.name}: {stage}{percent}", highlight=False)
                shown[child.name] = seen
            if live is not None:
                live.update(table)

        yield show


def summary(settings: LaunchSettings, engines: Sequence[Child], address: str) -> Panel:
    """The panel that stays on the screen once a node has started."""
    table = Table.grid(padding=(0, 2))
    table.add_row("address", address)
    names = [model.name for model in settings.models] or [settings.model_name]
    table.add_row("models" if len(names) > 1 else "model", "  ".join(names))
    if settings.ray_address is None:
        table.add_row("engines", "  ".join(engine.url for engine in engines))
    else:
        fleet = f"--ray-address {settings.ray_address} --ray-fleet {settings.ray_fleet}"
        table.add_row("engines", f"python -m sgl_ext.fleet {fleet} show")
    table.add_row("logs", settings.log_dir)
    table.add_row("see it", f"sgl-ext status --url {address}, or {address}/ in a browser")
    connect = f"sgl-ext clients claude-code --run --url {address}"
    table.add_row("connect", f"{connect}, or codex, opencode, ...; without a name: all")
    return Panel(table, title="sgl-ext is serving", title_align="left", expand=False)
