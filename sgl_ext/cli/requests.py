"""`sgl-ext requests`: past requests, and why each took its time or was refused."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.text import Text

from sgl_ext.cli.node import HERE, Json, Key, Node, Url, UsageError, node_at
from sgl_ext.cli.show import console, duration, percent, plain, print_json, table

_PATH = "/sgl_ext/requests"
_POLL_S = 1.0
# Processes of a balancer write their lines about once a second.
_LATE_S = 5.0
_BAD_REQUEST = 400


def requests(
    session: Annotated[
        str, typer.Option(metavar="ID", help="Those of this session, or the id's beginning.")
    ] = "",
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Those of this tenant.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Those that this model answered.")
    ] = "",
    status: Annotated[
        str, typer.Option(metavar="STATUS", help="A status, 4xx, 5xx, errors or refused.")
    ] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Those of the last 10m, 2h or 1d.")
    ] = "",
    slow: Annotated[
        bool, typer.Option("--slow", help="Those whose first token came latest, the slowest first.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new requests.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, max=1000, help="At most so many.")
    ] = 20,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List past requests, and what took each its time or refused it.

    For example: sgl-ext requests --status refused --since 5m; sgl-ext requests --session ID --slow
    """
    if slow and follow:
        raise UsageError("requests: --slow sorts what is there, so it does not go with --follow")
    query: dict[str, object] = {"limit": lines}
    query |= {"session": session} if session else {}
    query |= {"tenant": tenant} if tenant is not None else {}
    query |= {"model": model} if model else {}
    query |= {"status": status} if status else {}
    query |= {"since": f"{_seconds(since):.3f}"} if since else {}
    query |= {"slow": 1} if slow else {}
    node = node_at(url, key)
    found = node.get(f"{_PATH}?{urlencode(query)}")
    if as_json and not follow:
        print_json(found)
        return
    if follow:
        rows = found["requests"]
        _print_lines(reversed(rows), as_json=as_json)
        _follow(node, {**query, "limit": 1000}, rows, as_json=as_json)
        return
    _print(found, query)


def _seconds(text: str) -> float:
    from sgl_ext.settings.fields import without_unit

    value = without_unit(text, "SECONDS")
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"requests: --since={text!r}: must be a time, as 10m, 2h or 1d")
    return seconds


def _print(found: Mapping[str, Any], query: Mapping[str, object]) -> None:
    shown, rows, searched = console(), found["requests"], found["searched"]
    if rows:
        shown.print(_table(rows))
    else:
        shown.print("No request was found." if searched["lines"] else "There are no requests yet.")
    if found["groups"]:
        shown.print()
        heads = ("#requests", "status", "tenant", "why")
        groups = [
            (
                row["requests"],
                str(row["status"] or "-"),
                row["tenant"],
                row["error"] or row["outcome"],
            )
            for row in found["groups"]
        ]
        shown.print(table(heads, groups))
    if not searched["complete"] and searched["back_to_s"] is not None:
        ago = duration(max(time.time() - searched["back_to_s"], 0))
        more = (
            "" if found["found"] >= int(str(query["limit"])) else "; an earlier time was not read"
        )
        shown.print()
        shown.print(plain(f"Read back to {ago} ago{more}. --since reads further."), style="dim")


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A table of requests, without columns in which nothing differs from nothing."""
    models = [row.get("served_model") for row in rows]
    columns: dict[str, list[Any]] = {
        "time": [_clock(row) for row in rows],
        "status": [_status(row) for row in rows],
        "tenant": [row["tenant"] for row in rows],
        "model": models if len({*models}) > 1 else [],
        "session": [row["session"] for row in rows],
        "id": [row["id"] for row in rows],
        "#first token": [_first_token(row) for row in rows],
        "#cached": [percent(_share(row)) for row in rows],
        "why": [row["sentence"] for row in rows],
    }
    used = {head: cells for head, cells in columns.items() if any(cells)}
    return table(tuple(used), zip(*used.values(), strict=True))


def _print_lines(rows: Iterator[Any], *, as_json: bool) -> None:
    import json

    for row in rows:
        if as_json:
            print(json.dumps(row, ensure_ascii=True), flush=True)
            continue
        names = [row["tenant"], row["session"]]
        words = [_clock(row), str(_status(row)), *filter(None, names), row["id"], row["sentence"]]
        print(plain("  ".join(words)), flush=True)


def _follow(
    node: Node, query: Mapping[str, object], rows: Sequence[Mapping[str, Any]], *, as_json: bool
) -> None:
    """Prints new requests as they end, until it is interrupted."""
    latest_s = max((row["time"] for row in rows), default=time.time())
    seen = {(row["id"], row["time"]) for row in rows}
    while True:
        time.sleep(_POLL_S)
        after_s = latest_s - _LATE_S
        asked = {name: value for name, value in query.items() if name != "since"}
        found = node.get(f"{_PATH}?{urlencode({**asked, 'after': f'{after_s:.3f}'})}")
        new = [row for row in found["requests"] if (row["id"], row["time"]) not in seen]
        _print_lines(reversed(new), as_json=as_json)
        seen |= {(row["id"], row["time"]) for row in new}
        latest_s = max((row["time"] for row in new), default=latest_s)
        seen = {(name, at) for name, at in seen if at >= latest_s - 2 * _LATE_S}


def _clock(row: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(row["time"]).isoformat(" ", "seconds")[5:]


def _status(row: Mapping[str, Any]) -> Text:
    status, outcome = row["status"], row["outcome"]
    is_bad = (status or 0) >= _BAD_REQUEST or outcome in ("cut", "failed", "rejected")
    text = str(status or "-") + (f" {outcome}" if outcome in ("cut", "disconnected") else "")
    return Text(plain(text), style="red" if is_bad else "")


def _first_token(row: Mapping[str, Any]) -> str:
    first_ms = row["ttft_ms"]
    return f"{first_ms:,.0f} ms" if first_ms else ""


def _share(row: Mapping[str, Any]) -> float | None:
    prompt, cached = row["prompt_tokens"], row["cached_tokens"]
    return cached / prompt if prompt and cached is not None else None
