"""What the launcher prints: the progress of each engine, then how to connect a client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from sgl_ext.node.child import Child
from sgl_ext.settings.schema import LaunchSettings

# Text that SGLang logs at each stage, the latest stage first.
_STAGES = (
    ("The server is fired up", "ready"),
    ("Uvicorn running", "warming up"),
    ("Capture cuda graph", "capturing CUDA graphs"),
    ("KV Cache is allocated", "allocated the KV cache"),
    ("Load weight end", "loaded weights"),
    ("Load weight begin", "loading weights"),
    ("server_args=", "starting the scheduler"),
)


FLEET = "fleet"
"""The name of the child that keeps engines on Ray."""
FLEET_SERVES = "all engines serve"
"""What it logs once they do."""
_FLEET_STAGE = " engines serve"  # in a line of its log, after the time


@contextmanager
def start_progress(
    console: Console, children: Sequence[Child]
) -> Iterator[Callable[[set[str]], None]]:
    """Gives a function that shows each child's stage, "ready" for those whose names it gets.

    On a terminal they are shown live, elsewhere as a line for each change.
    """
    shown: dict[str, str] = {}
    with Live(console=console, transient=True) if console.is_terminal else nullcontext() as live:

        def show(ready: set[str]) -> None:
            table = Table.grid(padding=(0, 2))
            for child in children:
                stage = "ready" if child.name in ready else _stage_of(child)
                table.add_row(child.name, stage)
                if live is None and shown.get(child.name) != stage:
                    console.print(f"{child.name}: {stage}", highlight=False)
                shown[child.name] = stage
            if live is not None:
                live.update(table)

        yield show


def fleet_serves(child: Child) -> bool:
    """Whether a child that keeps engines on Ray has logged that they all serve."""
    return child.name == FLEET and any(FLEET_SERVES in line for line in child.last_lines(400))


def _stage_of(child: Child) -> str:
    """The latest stage in a child's log."""
    if child.name == FLEET:
        found = [line for line in child.last_lines(400) if _FLEET_STAGE in line]
        return found[-1].split(maxsplit=2)[-1] if found else "connecting to Ray"
    text = "\n".join(child.last_lines(400))
    return next((stage for mark, stage in _STAGES if mark in text), "importing")


def summary(settings: LaunchSettings, engines: Sequence[Child], address: str) -> Panel:
    """The panel that stays on the screen once a node has started."""
    key = "YOUR_KEY" if settings.balancer.api_key or settings.balancer.keys else "any"
    model = settings.model_name
    table = Table.grid(padding=(0, 2))
    table.add_row("address", address)
    table.add_row("model", model)
    if settings.ray_address is None:
        table.add_row("engines", "  ".join(engine.url for engine in engines))
    else:
        fleet = f"--ray-address {settings.ray_address} --ray-fleet {settings.ray_fleet}"
        table.add_row("engines", f"python -m sgl_ext.fleet {fleet} show")
    table.add_row("logs", settings.log_dir)
    claude = f"ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={key} claude --model {model}"
    table.add_row("Claude Code", claude)
    provider = f'base_url = "{address}/v1" and wire_api = "responses"'
    table.add_row("Codex", f'model = "{model}" and a model provider with {provider}')
    return Panel(table, title="sgl-ext is serving", title_align="left", expand=False)
