"""`sgl-ext clients`: how to connect Claude Code, Codex, OpenCode and others to a node."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from sgl_ext.cli.clients import configurations
from sgl_ext.cli.clients.configurations import PLACE_OF_KEY, Client, File, Start, clients_of
from sgl_ext.cli.node import Node, NodeError, UsageError, node_at
from sgl_ext.cli.options import HERE, Json, Key, Url
from sgl_ext.cli.show import console, plain, print_json, warn

# A variable of its user's that would win over one of these, or stand beside it.
_IN_THE_WAY = ("ANTHROPIC_API_KEY",)


def clients(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this one, such as codex.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="With --run: further arguments of the client."),
    ] = None,
    url: Url = HERE,
    key: Key = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write its configuration into a file of its own.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="Start it, connected to the node.")] = False,
    as_json: Json = False,
) -> None:
    """Print, write or use what connects a client such as Claude Code or Codex to the node."""
    if name is None and (write or run):
        raise UsageError("clients: --write and --run need the client's NAME")
    if arguments and not run:
        raise UsageError("clients: ARGUMENTS are for --run")
    node = node_at(url, key)
    card, needs_key = node.model(), _needs_key(node)
    # A key is passed on to what is started, and never printed or written.
    shown_key = node.key if run else PLACE_OF_KEY
    window = card.get("context_length")
    known = clients_of(
        configurations.Node(
            node.url,
            card["id"],
            shown_key if needs_key else None,
            window if isinstance(window, int) else None,
        )
    )
    if name is not None and name not in known:
        raise UsageError(f"clients: {name}: must be one of {', '.join(known)}")
    if name is not None and run:
        _run(name, known[name], arguments or [])
    elif name is not None and write:
        _write(name, known[name])
    else:
        chosen = known if name is None else {name: known[name]}
        _show(node.url, card["id"], chosen, needs_key=needs_key, as_json=as_json)


def _needs_key(node: Node) -> bool:
    """Whether clients of the node need a key."""
    if node.key is None:
        return False  # it has shown its models without one
    try:
        Node(node.url).get("/v1/models")
    except NodeError as error:
        return error.status == 401
    return False


def _show(
    url: str, model: str, chosen: dict[str, Client], *, needs_key: bool, as_json: bool
) -> None:
    if as_json:
        rows = [
            {"name": name, "how": _how(each), "file": f"~/{each.file.path}" if each.file else None}
            for name, each in chosen.items()
        ]
        print_json({"address": url, "model": model, "needs_key": needs_key, "clients": rows})
        return
    shown = console()
    for client in chosen.values():
        shown.print(client.title, style="bold")
        for line in _how(client).splitlines():
            # Whole lines, as they are copied from here.
            shown.print(f"  {plain(line)}", soft_wrap=True)
        shown.print()


def _how(client: Client) -> str:
    """What to write and to run, as it can be copied."""
    if client.start is None:
        return client.text
    line = _line(client.start)
    if client.file is None or not client.needs_file:
        return line
    return f"# ~/{client.file.path}\n{client.file.text}\n{line}"


def _line(start: Start) -> str:
    """A shell's line."""
    variables = [f"{name}={_word(value)}" for name, value in start.environment.items()]
    return " ".join([*variables, *map(_word, start.command)])


def _word(text: str) -> str:
    """A word of a shell's line. A path in the home stays one."""
    return f"~/{shlex.quote(text[2:])}" if text.startswith("~/") else shlex.quote(text)


def _write(name: str, client: Client) -> None:
    """Writes the client's file. Raises UsageError."""
    if client.file is None:
        raise UsageError(f"clients: {name} reads no file of its own; --run starts it")
    shown = console()
    shown.print(plain(f"Written: {_put(client.file)}"), soft_wrap=True)
    shown.print(plain(f"Start it: {_line(client.file.start)}"), soft_wrap=True)


def _put(file: File) -> Path:
    """Writes a file below the home. Raises UsageError if that fails."""
    path = Path.home() / file.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    except OSError as error:
        raise UsageError(f"clients: {path}: {error.strerror or error}") from None
    return path


def _run(name: str, client: Client, arguments: list[str]) -> None:
    """Becomes the client. Raises UsageError if it is not installed."""
    if client.start is None:
        raise UsageError(f"clients: {name} is not started by a command")
    program = shutil.which(client.start.command[0])
    if program is None:
        raise UsageError(f"clients: {client.start.command[0]} is not installed, or not on the PATH")
    if client.file is not None and client.needs_file:
        warn(f"clients: written: {_put(client.file)}")
    ours = {variable: _at_home(value) for variable, value in client.start.environment.items()}
    theirs = {k: v for k, v in os.environ.items() if k not in _IN_THE_WAY}
    words = [*map(_at_home, client.start.command), *arguments]
    os.execve(program, words, theirs | ours)


def _at_home(text: str) -> str:
    return str(Path.home() / text[2:]) if text.startswith("~/") else text
