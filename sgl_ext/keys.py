"""Creates, lists and revokes the API keys in a key file (`sgl_ext.key_file`).

    sgl-ext keys FILE add TENANT      prints a new key, once
    sgl-ext keys FILE list
    sgl-ext keys FILE revoke NAME

The file's comments and the order of its tables stay as they are.
"""

import fcntl
import json
import os
import secrets
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import dropwhile
from pathlib import Path

import tomlkit
from tomlkit.container import Container
from tomlkit.items import Comment, Item, Key, Table

from sgl_ext.arguments import Arguments
from sgl_ext.key_file import KeysError, hash_of, new_key, parse_keys, read_keys
from sgl_ext.wire.headers import TENANT_NAME


def add_key(path: Path, tenant: str, note: str = "") -> tuple[str, str]:
    """Adds a new key of a tenant to a file, or creates the file. Returns the key and its name."""
    key, name = new_key(), secrets.token_hex(4)
    if TENANT_NAME.fullmatch(tenant) is None:
        raise KeysError("tenant: a name is printable ASCII, like the value of an HTTP header")
    if not note.isprintable():
        raise KeysError("note: must be one line of printable text")
    fields = {"tenant": tenant, "sha256": hash_of(key.encode())}
    fields |= {"note": note} if note else {}
    created = datetime.now(UTC).replace(microsecond=0)
    table = tomlkit.dumps({"keys": {name: {**fields, "created": created}}})
    with _locked(path) as text:
        between = "\n" if text.endswith("\n") else "\n\n" if text else ""
        _write(path, text + between + table)
    return key, name


def revoke_key(path: Path, name: str) -> None:
    """Removes the key of this name from a file. Raises KeysError if the file has none."""
    with _locked(path) as text:
        document = tomlkit.parse(text)
        if name not in document.get("keys", {}):
            raise KeysError("there is no key of this name")
        _remove(document, name)
        _write(path, tomlkit.dumps(document))


def _remove(document: Container, name: str) -> None:
    """Removes a key's table, but not the comments at its end.

    For tomlkit they belong to that table, but they describe the table below. They go to the
    end of the table before it, or if there is none, ahead of all tables.
    """
    body = document.body
    end = next((n for n, (key, _) in enumerate(body) if key is not None), 0)
    comments: list[tuple[Key | None, Item]] = []
    for path, table in _tables(document):
        if path == ["keys", name]:
            values = [n for n, (key, _) in enumerate(table.body) if key is not None]
            tail = table.body[max(values, default=-1) + 1 :]
            comments = [*dropwhile(lambda entry: not isinstance(entry[1], Comment), tail)]
            break
        body, end = table.body, len(table.body)
    del document["keys"][name]
    body[end:end] = comments


def _tables(container: Container, *path: str) -> Iterator[tuple[list[str], Container]]:
    """The tables of a document that hold values, in the order of the file."""
    for key, item in container.body:
        if key is not None and isinstance(item, Table):
            if item.is_super_table():
                yield from _tables(item.value, *path, key.key)
            else:
                yield [*path, key.key], item.value


@contextmanager
def _locked(path: Path) -> Iterator[str]:
    """The text of a valid file, "" if there is none. Other runs of these commands wait."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        parse_keys(text)
        yield text
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    """Replaces a file in one step with one that only its owner can read."""
    parse_keys(text)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def _rows(path: Path) -> list[dict[str, str]]:
    """Each key's name, tenant, date and note, without its hash."""
    read_keys(path)
    keys = tomllib.loads(path.read_text("utf-8")).get("keys", {})
    shown = ("tenant", "created", "note")
    return [
        {"name": name, **{field: str(key.get(field, "")) for field in shown}}
        for name, key in keys.items()
    ]


def main(argv: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    """Runs the command. Raises SystemExit with the reason if it fails."""
    parser = Arguments(prog="sgl-ext keys", description="API keys.")
    parser.add_argument("file", type=Path, metavar="FILE")
    commands = parser.add_subparsers(dest="command", required=True)
    adds = commands.add_parser("add", help="create a key of a tenant and print it, once")
    adds.add_argument("tenant")
    adds.add_argument("--note", default="", help="a remark for the list, such as who got the key")
    lists = commands.add_parser("list", help="print each key's name, tenant, date and note")
    lists.add_argument("--json", action="store_true", help="print JSON for programs")
    commands.add_parser("revoke", help="remove a key").add_argument("name")
    args = parser.parse_args(argv)
    try:
        if args.command == "add":
            key, name = add_key(args.file, args.tenant, args.note)
            print(f"{name}, of {args.tenant}; the key is shown only now:", file=sys.stderr)
            show(key)
        elif args.command == "revoke":
            revoke_key(args.file, args.name)
            show(f"{args.name} is revoked")
        else:
            rows = _rows(args.file)
            if args.json:
                show(json.dumps(rows, indent=2))
            for row in rows if not args.json else ():
                show("  ".join(word for word in row.values() if word))
    except (KeysError, OSError) as error:
        raise SystemExit(f"sgl-ext keys: {args.file}: {error}") from None


if __name__ == "__main__":
    main()
