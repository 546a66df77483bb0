"""Creates, lists and revokes the API keys in a key file (`sgl_ext.key_file`).

    sgl-ext keys FILE add TENANT      prints a new key, once; --expires 90d, and limits
    sgl-ext keys FILE list
    sgl-ext keys FILE revoke NAME

The file's comments and the order of its tables stay as they are.
"""

import argparse
import fcntl
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from itertools import dropwhile
from pathlib import Path

import tomlkit
from tomlkit.container import Container
from tomlkit.items import Comment, Item, Key, Table

from sgl_ext.arguments import Arguments
from sgl_ext.key_file import KeysError, hash_of, new_key, parse_keys, read_keys
from sgl_ext.settings.fields import without_unit
from sgl_ext.wire.headers import TENANT_NAME


def add_key(
    path: Path, tenant: str, note: str = "", **limits: datetime | date | int | None
) -> tuple[str, str]:
    """Adds a new key of a tenant to a file, or creates the file. Returns the key and its name.

    limits: fields of `ApiKey`; None leaves one out.
    """
    key, name = new_key(), secrets.token_hex(4)
    if TENANT_NAME.fullmatch(tenant) is None:
        raise KeysError("tenant: a name is printable ASCII, like the value of an HTTP header")
    if not note.isprintable():
        raise KeysError("note: must be one line of printable text")
    fields = {"tenant": tenant, "sha256": hash_of(key.encode())}
    fields |= {"note": note} if note else {}
    created = datetime.now(UTC).replace(microsecond=0)
    stated = {k.replace("_", "-"): value for k, value in limits.items() if value is not None}
    table = tomlkit.dumps({"keys": {name: {**fields, "created": created, **stated}}})
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
    """Each key's name, tenant, dates, limits and note, without its hash."""
    keys = read_keys(path).by_hash.values()
    return [
        {"name": key.name, **{field: _shown(getattr(key, field)) for field in _SHOWN}}
        for key in keys
    ]


_LIMITS = ("requests_at_once", "requests_per_month", "tokens_per_month")
_SHOWN = ("tenant", "created", "expires", *_LIMITS, "note")


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _line(row: dict[str, str], now: datetime) -> str:
    """A key as a person reads it."""
    words = [row["name"], row["tenant"], row["created"]]
    if expires := row["expires"]:
        has_expired = _moment(expires).timestamp() <= now.timestamp()
        words.append(f"{'expired' if has_expired else 'expires'} {expires}")
    words += [f"{row[name]} {name.replace('_', ' ')}" for name in _LIMITS if row[name]]
    return "  ".join(word for word in (*words, row["note"]) if word)


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _expiry(text: str) -> datetime:
    """What `--expires` gives: a time from now, such as 90d, or a date."""
    seconds = without_unit(text, "SECONDS")
    if not isinstance(seconds, str):
        return (datetime.now(UTC) + timedelta(seconds=float(str(seconds)))).replace(microsecond=0)
    try:
        return _moment(text)
    except ValueError:
        raise argparse.ArgumentTypeError("must be 90d, 12h or 2027-01-31") from None


def main(argv: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    """Runs the command. Raises SystemExit with the reason if it fails."""
    parser = Arguments(prog="sgl-ext keys", description="API keys.")
    parser.add_argument("file", type=Path, metavar="FILE")
    commands = parser.add_subparsers(dest="command", required=True)
    adds = commands.add_parser("add", help="create a key of a tenant and print it, once")
    adds.add_argument("tenant")
    adds.add_argument("--note", default="", help="a remark for the list, such as who got the key")
    about = "the key is refused from then on: 90d from now, or a date such as 2027-01-31, in UTC"
    adds.add_argument("--expires", metavar="TIME", type=_expiry, help=about)
    for name in _LIMITS:
        flag, about = f"--{name.replace('_', '-')}", f"its limit of {name.replace('_', ' ')}"
        adds.add_argument(flag, metavar="N", type=int, help=about)
    about = "print each key's name, tenant, dates, limits and note"
    lists = commands.add_parser("list", help=about)
    lists.add_argument("--json", action="store_true", help="print JSON for programs")
    commands.add_parser("revoke", help="remove a key").add_argument("name")
    args = parser.parse_args(argv)
    try:
        if args.command == "add":
            limits = {name: getattr(args, name) for name in ("expires", *_LIMITS)}
            key, name = add_key(args.file, args.tenant, args.note, **limits)
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
                show(_line(row, datetime.now(UTC)))
    except (KeysError, OSError) as error:
        raise SystemExit(f"sgl-ext keys: {args.file}: {error}") from None


if __name__ == "__main__":
    main()
