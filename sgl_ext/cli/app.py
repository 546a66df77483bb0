"""The command `sgl-ext`: its verbs, its exit codes, and how it says what went wrong.

Exit codes: 0 done; 1 the node said no, is not ready or is not there; 2 the command line is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from sgl_ext.cli import bench, engines, passed_on, pins, prompts, reload, status, top
from sgl_ext.cli.clients.verb import clients
from sgl_ext.cli.completion import PROGRAM, answer_shell, completion
from sgl_ext.cli.context.verbs import app as contexts
from sgl_ext.cli.node import NodeError, UsageError
from sgl_ext.cli.show import console, plain, warn
from sgl_ext.version import versions

_INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        found = versions()
        commit = f" ({found.commit})" if found.commit else ""
        console().print(plain(f"{PROGRAM} {found.sgl_ext}{commit}, SGLang {found.sglang or '-'}"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def sgl_ext(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print versions and commit."
        ),
    ] = False,
) -> None:
    """Serve models with SGLang for coding agents, and operate a running node."""
    if context.invoked_subcommand is None:
        print(context.get_help())


_START, _LOOK, _CHANGE = "Start a node", "Look at a running node", "Change a running node"
_PREPARE = "Prepare"
_VERBS: dict[str, list[Callable[..., None]]] = {
    _START: [passed_on.serve],
    _LOOK: [status.status, top.top, prompts.explain, prompts.doctor, clients, bench.bench],
    _CHANGE: [engines.restart, engines.drain, engines.add, reload.reload],
    _PREPARE: [passed_on.size, passed_on.recipes, passed_on.keys, completion],
}
for panel, verbs in _VERBS.items():
    for verb in verbs:
        is_own = verb.__module__ != passed_on.__name__
        settings = {} if is_own else passed_on.AS_IT_IS
        app.command(rich_help_panel=panel, context_settings=settings, add_help_option=is_own)(verb)
app.add_typer(pins.app, name="pins", rich_help_panel=_LOOK)
app.add_typer(contexts, name="context", rich_help_panel=_CHANGE)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Raises SystemExit with its exit code."""
    answer_shell()
    try:
        code = app(args=argv, prog_name=PROGRAM, standalone_mode=False)
    except (typer.TyperException, UsageError) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        warn(message)
        code = 2
    except NodeError as error:
        warn(str(error))
        code = 1
    except typer.Abort:
        code = _INTERRUPTED
    raise SystemExit(code)
