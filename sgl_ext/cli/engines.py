"""Verbs that change engines: `restart`, `drain`, `add`, `reload`."""

import os
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.text import Text

from sgl_ext.cli.node import HERE, Json, Key, Node, NodeError, Url, UsageError, node_at
from sgl_ext.cli.show import console, plain, print_json, print_record, state, warn

_RESTART = "/sgl_ext/restart"
_WORKERS = "/sgl_ext/workers"
_RELOAD = "/sgl_ext/reload"
_POLL_S = 0.5
# While a balancer restarts, it does not answer.
_SILENCE_S = 30.0

_COMPLETION_S = 0.15


def engines_here(incomplete: str) -> list[str]:
    """The engines of the node whose names begin so, for a shell; none if it does not answer."""
    node = node_at(os.environ.get("SGL_EXT_URL", HERE), None)
    try:
        rows = node.get(_WORKERS, _COMPLETION_S)["workers"]
        names = [row["id"].partition("@")[0] for row in rows]
    except (NodeError, TypeError, LookupError):
        return []
    return [name for name in names if name.startswith(incomplete)]


EngineName = Annotated[
    str,
    typer.Argument(metavar="ENGINE", help="Its id, name or URL.", autocompletion=engines_here),
]


def restart(
    engine: Annotated[
        str | None,
        typer.Argument(
            metavar="ENGINE", help="An engine's id or name.", autocompletion=engines_here
        ),
    ] = None,
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAG", help="New flags of the engines, after --."),
    ] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="All engines, one by one.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --rolling: this model's engines.")
    ] = None,
    model_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Serve this model from now on.")
    ] = None,
    shows: Annotated[bool, typer.Option("--status", help="Show the last restart.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the engines are ready again.")] = True,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Restart an engine, or all one by one, without losing a request.

    Each engine finishes its requests first, while others serve.
    """
    if shows:
        _show_last(node_at(url, key), as_json=as_json)
        return
    flags = list(engine_args or ())
    if engine is not None and engine.startswith("-"):
        # What follows -- fills the arguments from the first on.
        flags.insert(0, engine)
        engine = None
    if flags and not flags[0].startswith("-"):
        raise UsageError("restart: give one ENGINE; flags of the engines go after --")
    if (engine is None) != rolling:
        raise UsageError("restart: give one ENGINE, or --rolling for all engines")
    node = node_at(url, key)
    order = {
        "engine": engine,
        "model": model,
        "model_path": model_path,
        "engine_args": flags or None,
    }
    operation = node.post(_RESTART, order)
    if wait:
        try:
            operation = _followed(node, operation, quiet=as_json)
        except KeyboardInterrupt:
            warn("the restart goes on; see sgl-ext status")
            raise
    if as_json:
        print_json(operation)
    if operation.get("state") == "failed":
        raise NodeError(f"restart: {operation.get('error') or 'failed without a reason'}")
    if not as_json:
        done = "restarted" if operation.get("state") == "done" else "restarting"
        console().print(f"{done}: {_names(operation)}")


def _show_last(node: Node, *, as_json: bool) -> None:
    operation = node.get(_RESTART)
    if as_json:
        print_json(operation)
    else:
        print_record(operation)
    if operation.get("state") == "failed":
        raise typer.Exit(1)


def _followed(node: Node, operation: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Prints each change of an operation until it ends. Returns what it came to."""
    shown, printed = console(), dict[str, tuple[object, object]]()
    id, heard_s = operation.get("id"), time.monotonic()
    while True:
        for row in operation.get("engines", ()):
            # The end of a log has lines of its own, which the error repeats.
            why = plain(str(row.get("reason") or "").partition("\n")[0])
            now = (row.get("state"), why)
            if printed.get(row["name"]) != now and not quiet:
                line = Text(f"{plain(row['name'])}: ").append_text(state(row.get("state")))
                shown.print(line.append(f" ({why})" if why else ""))
            printed[row["name"]] = now
        if operation.get("state") != "running":
            return operation
        time.sleep(_POLL_S)
        try:
            operation, heard_s = node.get(_RESTART), time.monotonic()
        except NodeError:
            if time.monotonic() - heard_s > _SILENCE_S:
                raise
        if operation.get("id") != id:
            raise NodeError("restart: another restart has begun; see sgl-ext status")


def _names(operation: dict[str, Any]) -> str:
    return plain(", ".join(row["name"] for row in operation.get("engines", ())) or "no engine")


def drain(
    engine: EngineName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has left.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even the last that is ready.")] = False,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Give an engine no new requests; after its last one it stays listed as drained.

    `sgl-ext undrain ENGINE`, or `add ENGINE`, takes it back.
    """
    node = node_at(url, key)
    row = _find(node, engine)
    if row.get("draining"):
        state = "is drained" if row.get("state") == "drained" else "drains"
        raise NodeError(f"{row['id']} {state} already. Take it back: sgl-ext undrain {row['id']}")
    others = [one for one in _workers(node) if one["url"] != row["url"]]
    alike = [one for one in others if one.get("model") == row.get("model")]
    if not force and not any(one.get("ready") and not one.get("draining") for one in alike):
        of = "" if len(alike) == len(others) else f" of the model {row['model']}"
        raise NodeError(
            f"{row['id']} is the last engine{of} that is ready: without it no request is answered. "
            "To drain it all the same: --force"
        )
    row = node.delete(f"{_WORKERS}?id={quote(row['id'], safe='')}")
    while wait and any(
        found["id"] == row["id"] and found.get("state") != "drained" for found in _workers(node)
    ):
        time.sleep(_POLL_S)
    if as_json:
        print_json(row)
    else:
        busy = "" if wait else f" and has {row['in_flight']:,} requests in flight"
        what = "is drained" if wait else "drains"
        back = f"undrain {row['id']}"
        console().print(plain(f"{row['id']} {what}{busy}. Take it back: sgl-ext {back}"))


def undrain(engine: EngineName, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Take back an engine that drains or is drained."""
    node = node_at(url, key)
    try:
        row = _find(node, engine)
    except NodeError as error:
        raise NodeError(f"{error}. One that has left comes back with sgl-ext add URL") from None
    if row.get("state") not in ("draining", "drained"):
        raise NodeError(f"{row['id']} does not drain: it is {row.get('state')}")
    row = node.post(_WORKERS, {"url": row["url"]})
    if as_json:
        print_json(row)
    else:
        console().print(plain(f"{row['id']} gets requests again"))


def add(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="http://HOST:PORT, or the name of an engine that is drained.",
            autocompletion=engines_here,
        ),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is ready.")] = False,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Add an engine that runs elsewhere, or take back one that drains or is drained.

    One that does not answer is not added, unless you --wait.
    """
    node = node_at(url, key)
    engine_url = engine if "://" in engine else str(_find(node, engine)["url"])
    row = node.post(_WORKERS, {"url": engine_url, "wait": wait})
    while wait and not row.get("ready"):
        time.sleep(_POLL_S)
        row = next((one for one in _workers(node) if one["id"] == row["id"]), row)
    if as_json:
        print_json(row)
    else:
        shown = ("id", "url", "state", "ready", "fault")
        print_record({name: row.get(name) for name in shown})


def _workers(node: Node) -> list[dict[str, Any]]:
    try:
        return list(node.get(_WORKERS)["workers"])
    except (TypeError, LookupError):
        raise NodeError(f"{node.url} runs another version of sgl-ext") from None


def _find(node: Node, name: str) -> dict[str, Any]:
    """The engine with this id, URL, or name: what its id has before the @."""
    # An engine with data-parallel ranks is a worker for each, and drains as a whole.
    rows = [row for row in _workers(node) if not row.get("rank")]
    for fits in (
        lambda row: name in (row["id"], row["url"]),
        lambda row: row["id"].partition("@")[0].partition(".")[0] == name,
    ):
        found = [row for row in rows if fits(row)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{name} may be {' or '.join(row['id'] for row in found)}")
    known = ", ".join(row["id"] for row in rows) or "none"
    raise NodeError(f"no engine is {name}; there are: {known}")


def reload(url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Read the node's configuration again, and apply what can change while it runs."""
    document = node_at(url, key).post(_RELOAD)
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
