"""`sgl-ext reload`: apply a changed configuration without a restart."""

import typer

from sgl_ext.cli.node import node_at
from sgl_ext.cli.options import HERE, Json, Key, Url
from sgl_ext.cli.show import console, plain, print_json

_PATH = "/sgl_ext/reload"


def reload(url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Read the node's configuration again, and apply what can change while it runs."""
    document = node_at(url, key).post(_PATH)
    refused = [row for row in document.get("engines", ()) if not row.get("applied")]
    if as_json:
        print_json(document)
        raise typer.Exit(bool(refused))
    shown = console()
    changed = ", ".join(map(str, document["changed"]))
    shown.print(plain(f"changed: {changed}" if changed else "nothing has changed"))
    for row in document["unchanged_until_restart"]:
        shown.print(plain(f"not before a restart: {row['key']}: {row['why']}"))
    for row in refused:
        shown.print(plain(f"not by {row['id']}: {row.get('why')}"))
    if refused:
        raise typer.Exit(1)
