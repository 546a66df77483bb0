"""`sgl-ext events`: what happened on a node."""

import json
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from sgl_ext.cli.node import HERE, Json, Key, NodeError, Url, node_at
from sgl_ext.cli.show import console, plain, print_json
from sgl_ext.cli.status import LIVE, STATE

STYLES = {"warning": "yellow", "error": "red"}


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, max=200, help="At most so many.")
    ] = 200,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show what happened on a node: starts, crashes with their cause, drains, reloads, limits.

    The balancer keeps the last 200 events, also over a restart. The oldest comes first.
    """
    node = node_at(url, key)
    shown = _events_of(node.get(STATE), node.url)
    if as_json and not follow:
        print_json(shown[-lines:])
        return
    _print(shown[-lines:], as_json=as_json)
    while follow:
        for document in node.events(LIVE):
            found = _events_of(document, node.url)
            _print(new_events(shown, found), as_json=as_json)
            shown = found


def new_events(before: list[Any], now: list[Any]) -> list[Any]:
    """Those that follow the last one of before."""
    if not before or before[-1] not in now:
        return now
    return now[len(now) - now[::-1].index(before[-1]) :]


def _events_of(document: Any, url: str) -> list[Any]:
    try:
        return list(document["events"])
    except (TypeError, LookupError):
        raise NodeError(f"{url} runs another version of sgl-ext") from None


def _print(rows: list[Any], *, as_json: bool) -> None:
    shown = console()
    for row in rows:
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        at = datetime.fromtimestamp(row["time_s"]).isoformat(" ", "seconds")
        line = Text(f"{at}  ").append(plain(row["kind"]), style=STYLES.get(row["level"], ""))
        times = f" ({row['times']:,} times)" if row["times"] > 1 else ""
        about = ": ".join(part for part in (row["subject"], row["text"]) if part)
        shown.print(line.append(plain(f"  {about}{times}")), soft_wrap=True)
