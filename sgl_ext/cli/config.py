"""`sgl-ext config`: a file with settings, checked or shown without starting anything."""

from pathlib import Path
from typing import Annotated

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
    """Show what holds for a command line of `serve`, or of a running node, and where each value
    comes from.

    For example: sgl-ext config show --config node.toml --tp 2; sgl-ext config show --running .run.
    Secrets are never shown.
    """
    rows = _rows(context.args if running is None else command_line(running))
    rows = [row for row in rows if every or row["source"] != _DEFAULT]
    if as_json:
        print_json(rows)
    elif not rows:
        console().print("All settings are defaults; --all shows them.")
    else:
        values = [(row["key"], row["value"], row["source"]) for row in rows]
        console().print(table(("key", "value", "source"), values))


def command_line(folder: Path, proc: Path = Path("/proc")) -> list[str]:
    """What the launcher that uses a run folder was started with, its file as a whole path. Of a
    file that was changed since, it is what a reload would apply.

    Raises NodeError without such a launcher, or if it is another user's.
    """
    process = node_process(folder)
    if process is None:
        raise NodeError(f"no node runs with the run folder {folder}: give the node's --log-dir")
    try:
        words = (proc / str(process) / "cmdline").read_bytes().decode().split("\0")[:-1]
        home = Path(proc / str(process) / "cwd").readlink()
    except OSError as error:
        raise NodeError(f"process {process}: {error.strerror}: use sudo") from None
    at = next((n for n, word in enumerate(words) if word == "serve"), None)
    if at is None:  # python -m sgl_ext.launch
        at = next(n for n, word in enumerate(words) if "launch" in word)
    words = words[at + 1 :]
    for number, word in enumerate(words[1:], 1):
        if words[number - 1] == "--config" and (home / word).is_file():
            words[number] = str(home / word)
    return words


def _rows(argv: list[str]) -> list[dict[str, object]]:
    """Each setting with its value and source. Raises UsageError for wrong ones."""
    from sgl_ext.node.flags import check_given_flags
    from sgl_ext.settings.fields import changed
    from sgl_ext.settings.schema import SettingsError
    from sgl_ext.settings.sources import TABLES, config_of, launch_flags, sourced_settings

    if argv and Path(argv[0]).suffix == ".toml":
        raise UsageError(f"config show: give the file as --config {argv[0]}")
    try:
        settings, names = sourced_settings(argv)
        check_given_flags(settings.engine_args, argv, config_of(argv), launch_flags())
    except SettingsError as error:
        raise UsageError(str(error)) from None
    given = changed(settings)
    rows: list[dict[str, object]] = []
    for name, field in {**TABLES["launch"], **TABLES["balancer"]}.items():
        source = names.get(name, _DEFAULT)
        value = given.pop(name) if name in given else field.shown_default
        key = name.replace("_", "-")
        rows.append({"key": key, "value": value, "source": _place(source)})
    for name, source in (
        ("tenants", "[tenants]"),
        ("hints", "[hints]"),
        ("engine_args", "[engine]"),
    ):
        if name in given:
            value = given[name] if name != "hints" else [f"{h.of}.{h.name}" for h in given[name]]
            rows.append({"key": name.replace("_", "-"), "value": value, "source": source})
    return rows


def _place(source: str) -> str:
    """The file and table of a source without its key, which the row has; a flag as it is."""
    place, end, _ = source.rpartition("]")
    return place + end if end else source
