"""`sgl-ext pins`: the pinned prefixes of all engines."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from sgl_ext.cli.node import HERE, Json, Key, Url, UsageError, node_at
from sgl_ext.cli.show import console, duration, plain, print_json, table

_PATH = "/v1/pins"
app = typer.Typer()


@app.callback(invoke_without_command=True)
def pins(context: typer.Context, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """List the pinned prefixes, or delete some."""
    if context.invoked_subcommand is not None:
        return
    document = node_at(url, key).get(_PATH)
    if as_json:
        print_json(document)
        return
    rows = document["pins"]
    if not rows:
        console().print("There are no pins.")
        return
    heads = ("prefix", "#tokens", "tier", "#hits", "#left", "tenant", "session", "engine")
    console().print(table(heads, map(_row, sorted(rows, key=lambda row: -row["tokens"]))))


def _row(pin: dict[str, Any]) -> tuple[object, ...]:
    left = duration(pin["left_s"])
    names = (pin.get("owner"), pin.get("session"), pin.get("worker"))
    tier = pin.get("tier", "device")
    return (pin["prefix"], pin["tokens"], tier, pin.get("hits"), left, *names)


@app.command()
def delete(
    prefixes: Annotated[
        list[str] | None, typer.Argument(metavar="PREFIX", help="The prefix, as the list shows it.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="All pins of this session.")
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Delete pins on every engine, by their prefixes or their session."""
    named = [("prefix", prefix) for prefix in prefixes or ()]
    named += [("session", session)] if session else []
    if not named:
        raise UsageError("pins delete: give PREFIX ... or --session ID")
    node, deleted = node_at(url, key), dict[str, int]()
    for kind, name in named:
        answers = node.delete(f"{_PATH}?{kind}={quote(name, safe='')}")
        deleted[name] = sum(answer.get("deleted", 0) for answer in answers.values())
    if as_json:
        print_json({"deleted": deleted})
    else:
        for name, count in deleted.items():
            console().print(
                plain(f"{name}: {count:,} deleted" if count else f"{name}: no such pin")
            )
    if not all(deleted.values()):
        raise typer.Exit(1)
