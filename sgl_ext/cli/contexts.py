"""`sgl-ext context`: the verbs."""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from sgl_ext.cli.node import HERE, Json, Key, Node, NodeError, Url, UsageError, node_at
from sgl_ext.cli.prompts import STDIN, path_for, read_body
from sgl_ext.cli.show import console, duration, plain, print_json, table, warn

_PATH = "/v1/contexts"
_MOST_NAME_CHARS = 128
_MOST_CHANGES = 20
_PAGE = 100
app = typer.Typer(no_args_is_help=True, help="Build, list, show and delete contexts.")


@app.command()
def build(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The repository, or a part of it.")
    ] = Path("."),
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON list of tools, which come first.")
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="A file of the repository to add; may be repeated."),
    ] = None,
    runtime: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A block that each request brings; may be repeated."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A captured request in place of a repository; - reads."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(metavar="PATH", help="The captured request's path.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name in the list.")] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to remember this build.")
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Build a context from a repository or a captured request, and register it at the node.

    Built again, it names the block that changed since the last time.
    """
    from sgl_ext.cli.context_build import (
        Source,
        build_of,
        changes,
        read_captured,
        read_last_build,
        read_repository,
        state_path,
        tools_source,
        write_build,
    )

    if request is not None and (tools or document or folder != Path(".")):
        raise UsageError("--request: cannot be combined with FOLDER, --tools or --document")
    node = node_at(url, key)
    skipped: list[str] = []
    covers: dict[str, int] | None = None
    if request is not None:
        body = read_body(request)
        sources, covers = read_captured(path or path_for(body, request), body, request)
    else:
        sources, skipped = read_repository(folder, document or [])
        if tools is not None:
            sources.insert(0, tools_source("tools", "stable", _read_tools(tools), str(tools)))
    of = folder.resolve() if request is None else Path(request)
    sources += [Source(id, "system", "runtime", None, id, []) for id in runtime or ()]
    fields = ("id", "kind", "layer", "content")
    blocks = [{field: getattr(each, field) for field in fields} for each in sources]
    if not any(block["content"] for block in blocks):
        raise UsageError(f"{of}: has nothing for a context: no rules, skills, tools or files")
    name = (name or of.name)[:_MOST_NAME_CHARS]
    made = node.post(_PATH, {"name": name, "blocks": blocks})
    state = state or (None if request == STDIN else state_path(of, dict(os.environ)))
    old = read_last_build(state)
    changed = [] if old is None else changes(old, sources)
    document_ = {
        **made,
        "tokens": _tokens(node, made["context_id"]),
        "changes": None if old is None else [{**c._asdict(), "text": str(c)} for c in changed],
        "skipped": skipped,
        "covers": covers,
    }
    for line in skipped:
        warn(f"skipped {line}")
    if as_json:
        print_json(document_)
    else:
        _print_build(document_, is_first=old is None)
    if state is not None:
        try:
            write_build(state, build_of(made["context_id"], sources))
        except OSError as error:
            warn(f"{state}: {error.strerror}; the next build cannot name what changed")


def _print_build(made: dict[str, Any], *, is_first: bool) -> None:
    shown = console()
    shown.print(plain(made["context_id"]))
    heads = ("block", "layer", "#bytes", "pinned")
    rows = [
        (block["id"], block["layer"], block["bytes"], duration(block["pinned_s"]))
        for block in made["blocks"]
    ]
    shown.print(table(heads, rows))
    tokens = "" if made["tokens"] is None else f", {made['tokens']:,} tokens"
    shown.print(f"{made['bytes']:,} bytes{tokens}")
    if made["covers"]:
        covered = ", ".join(f"{name}={count}" for name, count in made["covers"].items())
        shown.print(plain(f"of the request: {covered}"))
    changed = made["changes"] or []
    if not is_first and not changed:
        shown.print("nothing changed since the last build")
    for change in changed[:_MOST_CHANGES]:
        shown.print(plain(change["text"]))
    if len(changed) > _MOST_CHANGES:
        shown.print(f"... and {len(changed) - _MOST_CHANGES} more")


def _read_tools(file: Path) -> list[Any]:
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise UsageError(f"--tools {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--tools {file}: is not JSON: {error}") from None
    listed = document.get("tools") if isinstance(document, dict) else document
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"--tools {file}: must be a list of tools, or an object with `tools`")
    return listed


def _tokens(node: Node, id: str) -> int | None:
    """How many tokens a context adds to a prompt; None if the node cannot count them."""
    try:
        model = node.model()["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        counted = [
            int(node.post("/v1/messages/count_tokens", body | more)["input_tokens"])
            for more in ({"context_id": id}, {})
        ]
    except (NodeError, LookupError, TypeError, ValueError):
        return None
    return counted[0] - counted[1]


@app.command("list")
def list_contexts(
    limit: Annotated[int, typer.Option(min=1, help="The most that are read.")] = 1000,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List the contexts of the key's tenant, the last used first."""
    node = node_at(url, key)
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = node.get(f"{_PATH}?limit={min(_PAGE, limit)}{after}")
        found += page["data"]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
        if len(found) >= limit:
            warn(f"there are more than these {len(found):,}: raise --limit")
            break
    found.sort(key=lambda context: -context["last_used_at"])
    if as_json:
        print_json({"object": "list", "data": found})
        return
    if not found:
        console().print("There are no contexts.")
        return
    now = time.time()
    rows = [
        (
            context["context_id"],
            context["name"],
            context["bytes"],
            ", ".join(context["layers"] or ()),
            duration(now - context["last_used_at"]),
            duration(context["expires_at"] - now),
        )
        for context in found
    ]
    console().print(table(("context", "name", "#bytes", "layers", "#used ago", "#left"), rows))


@app.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="The context, as the list shows it.")],
    content: Annotated[bool, typer.Option("--content", help="Also its content, as JSON.")] = False,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show the blocks of a context."""
    query = "?content=true" if content else ""
    found = node_at(url, key).get(f"{_PATH}/{quote(id, safe='')}{query}")
    if as_json or content:
        print_json(found)
        return
    left = duration(found["expires_at"] - time.time())
    console().print(plain(f"{found['name'] or '-'}: {found['bytes']:,} bytes, {left} left"))
    heads = ("block", "kind", "layer", "#bytes", "hash")
    rows = [
        (b["id"], b["kind"], b["layer"], b["bytes"], (b["hash"] or "")[:12])
        for b in found["blocks"]
    ]
    console().print(table(heads, rows))


@app.command()
def delete(
    ids: Annotated[list[str], typer.Argument(metavar="ID ...", help="The contexts.")],
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Delete contexts from the store. What engines have cached of them stays."""
    node, deleted = node_at(url, key), dict[str, bool]()
    for id in ids:
        try:
            deleted[id] = node.delete(f"{_PATH}/{quote(id, safe='')}")["deleted"]
        except NodeError as error:
            if error.status != 404:
                raise
            deleted[id] = False
    if as_json:
        print_json({"deleted": deleted})
    else:
        for id, is_deleted in deleted.items():
            console().print(plain(f"{id}: {'deleted' if is_deleted else 'no such context'}"))
    if not all(deleted.values()):
        raise typer.Exit(1)
