"""`sgl-ext config`: a file with settings, checked or shown without starting anything."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_ext.cli.node import Json, NodeError, UsageError
from sgl_ext.cli.run_folder import node_process
from sgl_ext.cli.show import console, print_json, table

app = typer.Typer(no_args_is_help=True)
_AS_SERVE = {"ignore_unknown_options": True, "allow_extra_args": True}
_File = Annotated[
    str, typer.Argument(metavar="FILE", help="A TOML file, or a recipe such as gpu or cpu.")
]
_DEFAULT = "default"
SETTINGS = "settings.json"
"""The file in a run folder with what its node uses (`sgl_ext.node.in_effect`)."""


@app.callback()
def config() -> None:
    """Check or show a node's settings without starting it."""


@app.command(context_settings=_AS_SERVE)
def check(context: typer.Context, file: _File) -> None:
    """Check a file, with further flags of `serve` if there are any.

    Exit code 2: the file is wrong; the error names its key and value.
    """
    rows = _rows(["--config", file, *context.args])
    given = sum(row["source"] != _DEFAULT for row in rows)
    console().print(f"{file} is right: {given} settings are given, the others are defaults")


@app.command(context_settings=_AS_SERVE)
def show(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Show defaults, too.")] = False,
    running: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Of the node that runs with this run folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what holds for a command line of `serve`, or what a running node uses, reloads and
    restarts included, and where each value comes from.

    For example: sgl-ext config show --config node.toml --tp 2; sgl-ext config show --running .run.
    Secrets are never shown.
    """
    rows = _rows(context.args) if running is None else _running(running)
    rows = [row for row in rows if every or row["source"] != _DEFAULT]
    if as_json:
        print_json(rows)
    elif not rows:
        console().print("All settings are defaults; --all shows them.")
    else:
        values = [(row["key"], _shown(row["key"], row["value"]), row["source"]) for row in rows]
        console().print(table(("key", "value", "source"), values))


def _shown(key: str, value: object) -> object:
    """A value for a table, in which the digits of a port are not in groups."""
    return str(value) if key.rpartition("-")[2] == "port" else value


def _running(folder: Path) -> list[dict[str, Any]]:
    """What the node that runs with a run folder uses now. Raises NodeError without such a node."""
    if node_process(folder) is None:
        raise NodeError(f"no node runs with the run folder {folder}: give the node's --log-dir")
    try:
        rows: list[dict[str, Any]] = json.loads((folder / SETTINGS).read_bytes())
    except OSError as error:
        about = f"{folder / SETTINGS}: {error.strerror}"
        raise NodeError(
            f"{about}: the node is just starting, or another user's: use sudo"
        ) from None
    return rows


def _rows(argv: list[str]) -> list[dict[str, Any]]:
    """Each setting with its value and source. Raises UsageError for wrong ones."""
    from sgl_ext.node.flags import check_given_flags
    from sgl_ext.settings.fields import launch_flags
    from sgl_ext.settings.schema import SettingsError
    from sgl_ext.settings.sources import config_of, setting_rows, sourced_settings

    if argv and Path(argv[0]).suffix == ".toml":
        raise UsageError(f"config show: give the file as --config {argv[0]}")
    try:
        settings, names = sourced_settings(argv)
        check_given_flags(settings.engine_args, argv, config_of(argv), launch_flags())
    except SettingsError as error:
        raise UsageError(str(error)) from None
    return setting_rows(settings, names)
