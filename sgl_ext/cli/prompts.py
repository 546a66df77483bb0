"""Verbs about prompts: `explain` where one goes or went, and `doctor`, where prompts diverge."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from sgl_ext.cli.node import HERE, KEY_VARIABLE, Json, Key, NodeError, Url, UsageError, node_at
from sgl_ext.cli.show import console, plain, print_json, print_record, table, warn

_EXPLAIN = "/sgl_ext/explain"
_PAST = "/sgl_ext/requests"
STDIN = "-"
# A field that only bodies for this path have, the first that fits.
_PATH_BY_FIELD = {
    "input": "/v1/responses",
    "text": "/generate",
    "input_ids": "/generate",
    "prompt": "/v1/completions",
    "system": "/v1/messages",
}
# The heads of the table of engines, numbers with "#".
_COLUMNS = {
    "name": "engine",
    "cost": "#cost",
    "held_tokens": "#held",
    "pinned_tokens": "#pinned",
    "pending": "#pending",
    "uncached": "#uncached",
    "decoding": "#decoding",
    "recent": "#recent",
    "sessions": "#sessions",
    "open": "open",
    "has_room": "room",
}
_MESSAGES, _CHAT = "/v1/messages", "/v1/chat/completions"


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|ID", help="A file with a request's body, - for stdin; or a past id."
        ),
    ],
    path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The path that the body is for, if it is not plain."),
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show where a request would go and why, or where a past one went.

    A past request is one of the request log; clients get its id as x-request-id or request-id.
    """
    node = node_at(url, key)
    if what != STDIN and not Path(what).is_file():
        try:
            document = node.get(f"{_PAST}/{quote(what, safe='')}")
        except NodeError as error:
            if error.status != 404:
                raise
            raise NodeError(f"{what}: is no file here, and {error}", error.status) from None
    else:
        body = read_body(what)
        path = path or path_for(body, what)
        document = node.post_text(f"{_EXPLAIN}{path}", body)
        if not as_json:
            warn(f"explaining it as POST {path}")
    if as_json:
        print_json(document)
    else:
        _print_explanation(document)


def _print_explanation(document: dict[str, Any]) -> None:
    """Prints the values, a table of what each engine would have cost, without empty columns, and of
    a past request a sentence."""
    said = ""
    if "outcome" in document:
        from sgl_ext.doctor.requests import sentence

        said = sentence(document)
    workers = document.pop("workers", None) or []
    if "time" in document:
        document["time"] = datetime.fromtimestamp(document["time"]).isoformat(" ", "seconds")
    print_record(document)
    columns = [
        name
        for name in _COLUMNS
        if name in ("name", "cost") or any(row.get(name) for row in workers)
    ]
    if workers:
        rows = [[row.get(name) for name in columns] for row in workers]
        shown = console()
        shown.print()
        shown.print(table([_COLUMNS[name] for name in columns], rows))
    if said:
        console().print(f"\n{plain(said)}.")


def read_body(what: str) -> bytes:
    """The bytes of a file, or of standard input. Raises UsageError."""
    try:
        return sys.stdin.buffer.read() if what == STDIN else Path(what).read_bytes()
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from None


def path_for(body: bytes, what: str) -> str:
    """The path that a body is for, by its fields. Raises UsageError if it is no request."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise UsageError(f"{what}: is not JSON: {error}") from None
    if isinstance(document, dict):
        for field, path in _PATH_BY_FIELD.items():
            if field in document:
                return path
        if "messages" in document:
            return _MESSAGES if _is_anthropic(document) else _CHAT
    raise UsageError(f"{what}: is no request that is placed; name its path with --path")


def _is_anthropic(document: Mapping[str, Any]) -> bool:
    tools = document.get("tools")
    first = tools[0] if isinstance(tools, list) and tools else None
    return isinstance(first, dict) and "input_schema" in first


def doctor(
    log: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG | compare BEFORE AFTER", help="A request log; - is stdin. Or two of them."
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With compare: what a million tokens cost."),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Show what a model's chat template does."),
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show where prompts diverge, by a request log or the running node. Or compare two logs.

    Exit code 1: prompts diverge. 2: the log or the node cannot be read.
    """
    if template is not None:
        show_template(template, as_json=as_json)
        return
    from sgl_ext.doctor.__main__ import main

    flags = ["--json"] if as_json else []
    flags += ["--prices", str(prices)] if prices is not None else []
    if log:
        raise typer.Exit(main([*log, *flags]))
    if key is None and os.environ.get(KEY_VARIABLE):
        key = f"env:{KEY_VARIABLE}"
    flags += ["--api-key", key] if key is not None else []
    raise typer.Exit(main(["--url", node_at(url, None).url, *flags]))


_MODULE = "sgl_ext.compat.template_folder"


def show_template(folder: Path, *, as_json: bool) -> None:
    """Prints it. Raises UsageError and NodeError."""
    if not folder.is_dir():
        raise UsageError(f"doctor: --template={str(folder)!r}: is no folder")
    if find_spec("sglang") is None:
        raise UsageError("doctor: --template needs SGLang: pip install 'sgl-ext[engine]'")
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", _MODULE, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["it ended without a word"]
        raise NodeError(f"doctor: {lines[-1]}")
    facts = json.loads(ended.stdout)
    print_json(facts) if as_json else print_record(facts)
