"""`sgl-ext usage`: what tenants and their keys used of each model on each day."""

import csv
import sys
from typing import Annotated

import typer

from sgl_ext.cli.node import HERE, Json, Key, Url, node_at
from sgl_ext.cli.show import console, print_json, table

_PATH = "/sgl_ext/usage"
_COLUMNS = ("day", "tenant", "key", "model", "requests", "tokens")
# A spreadsheet would compute a cell that begins so. Names can come from clients.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def usage(
    month: Annotated[
        str, typer.Option(metavar="MONTH", help="A month of UTC, as 2026-11. Default: this one.")
    ] = "",
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Of this tenant.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of this model.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show what tenants and their keys used of each model on each day of a month.

    tokens: prompt tokens that were computed, and output tokens. Requests without a key have none.
    """
    document = node_at(url, key).get(f"{_PATH}?month={month}" if month else _PATH)
    uses = [
        use
        for use in document["usage"]
        if tenant in (None, use["tenant"]) and model in (None, use.get("model"))
    ]
    if as_json:
        print_json({**document, "usage": uses})
        return
    names = ("period", *_COLUMNS[1:])
    rows = [tuple(use.get(name, "") for name in names) for use in uses]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([[_as_text(value) for value in row] for row in rows])
    elif rows:
        console().print(table(("day", "tenant", "key", "model", "#requests", "#tokens"), rows))
    else:
        console().print(f"Nothing was used in {document['month']}.")


def _as_text(value: object) -> object:
    is_formula = isinstance(value, str) and value.startswith(_FORMULAS)
    return f"'{value}" if is_formula else value
