"""What the launcher prints: the progress of each engine, then how to connect a client."""

from __future__ import annotations

from collections.abc import Sequence

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


def stage_of(child: Child) -> str:
    """The latest stage in a child's log."""
    text = "\n".join(child.last_lines(400))
    return next((stage for mark, stage in _STAGES if mark in text), "importing")


class StartProgress:
    """Shows each engine's stage: live on a terminal, elsewhere as a line for each change."""

    def __init__(self, console: Console, children: Sequence[Child]) -> None:
        self._console = console
        self._children = children
        self._live = Live(console=console, transient=True) if console.is_terminal else None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> StartProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, ready: set[str]) -> None:
        """Shows the current stage of each child."""
        stages = {c.name: "ready" if c.name in ready else stage_of(c) for c in self._children}
        if self._live:
            table = Table.grid(padding=(0, 2))
            for name, stage in stages.items():
                table.add_row(name, stage)
            self._live.update(table)
            return
        for name, stage in stages.items():
            if self._shown.get(name) != stage:
                self._console.print(f"{name}: {stage}", highlight=False)
        self._shown = stages


def summary(settings: LaunchSettings, engines: Sequence[Child], address: str) -> Panel:
    """The panel that stays on the screen once a node has started."""
    key = "YOUR_KEY" if settings.balancer.api_key or settings.balancer.keys else "any"
    model = settings.model_name
    table = Table.grid(padding=(0, 2))
    table.add_row("address", address)
    table.add_row("model", model)
    table.add_row("engines", "  ".join(engine.url for engine in engines))
    table.add_row("logs", settings.log_dir)
    table.add_row(
        "Claude Code",
        f"ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={key} claude --model {model}",
    )
    table.add_row(
        "Codex",
        f'model = "{model}" and a model provider with '
        f'base_url = "{address}/v1" and wire_api = "responses"',
    )
    return Panel(table, title="sgl-ext is serving", title_align="left", expand=False)
