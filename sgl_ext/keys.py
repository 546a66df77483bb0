"""Makes, lists and revokes API keys in a file (`sgl_ext.key_file`).

    python -m sgl_ext.keys FILE add TENANT      prints a new key, this once
    python -m sgl_ext.keys FILE list
    python -m sgl_ext.keys FILE revoke NAME

What a person wrote in the file stays as it is.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import secrets
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from sgl_ext.key_file import KeysError, hash_of, parse_keys, read_keys
from sgl_ext.tenants import TENANT_NAME


def new_key() -> str:
    """A key that nobody has."""
    return "sgl-" + secrets.token_urlsafe(32)


def add_key(path: Path, tenant: str, note: str = "") -> tuple[str, str]:
    """Adds a new key of a tenant to a file, which need not exist: the key, and its name."""
    key, name = new_key(), secrets.token_hex(4)
    if TENANT_NAME.fullmatch(tenant) is None:
        raise KeysError("tenant: a name is printable ASCII, as a header's value is")
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [f"[keys.{name}]", f"tenant = {_quoted(tenant)}", f'sha256 = "{hash_of(key.encode())}"']
    lines += [f"created = {created}", *([f"note = {_quoted(note)}"] if note else [])]
    table = "\n".join(lines) + "\n"
    with _locked(path):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        parse_keys(text)
        before = text if not text or text.endswith("\n") else text + "\n"
        _write(path, before + ("\n" if before else "") + table)
    return key, name


def revoke_key(path: Path, name: str) -> None:
    """Takes the key of this name out of a file. Raises KeysError if there is none."""
    with _locked(path):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before = parse_keys(text)
        begins = re.compile(rf"\s*\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]\s*(#.*)?")
        kept, is_out = [], False
        for line in text.splitlines(keepends=True):
            if line.lstrip().startswith("["):
                is_out = begins.fullmatch(line.rstrip("\n")) is not None
            if not is_out:
                kept.append(line)
        after = parse_keys("".join(kept))
        gone = before.tenants_by_hash.items() - after.tenants_by_hash.items()
        is_all = len(gone) == len(before.tenants_by_hash) - len(after.tenants_by_hash) == 1
        if not is_all or after.allowances != before.allowances:
            raise KeysError("the file has no table of its own for a key of this name")
        _write(path, "".join(kept))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else changes files of this folder with these commands meanwhile."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    """Puts a new file, readable by its owner alone, in the place of the old one at once."""
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


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def main(argv: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    """The command. Raises SystemExit with a reason if it cannot do as it is told."""
    parser = argparse.ArgumentParser(prog="python -m sgl_ext.keys", description="API keys.")
    parser.add_argument("file", type=Path, metavar="FILE")
    commands = parser.add_subparsers(dest="command", required=True)
    adds = commands.add_parser("add", help="make a key of a tenant and print it, this once")
    adds.add_argument("tenant")
    adds.add_argument("--note", default="", help="whom it was given to, say")
    commands.add_parser("list", help="each key's name, tenant, and day")
    commands.add_parser("revoke", help="take a key out").add_argument("name")
    asked = parser.parse_args(argv)
    try:
        if asked.command == "add":
            key, name = add_key(asked.file, asked.tenant, asked.note)
            print(f"{name}, of {asked.tenant}; it is shown this once:", file=sys.stderr)
            show(key)
        elif asked.command == "revoke":
            revoke_key(asked.file, asked.name)
            show(f"{asked.name} is revoked")
        else:
            read_keys(asked.file)
            for name, key in tomllib.loads(asked.file.read_text("utf-8")).get("keys", {}).items():
                said = (name, key["tenant"], key.get("created", ""), key.get("note", ""))
                show("  ".join(str(word) for word in said if word != ""))
    except (KeysError, OSError) as error:
        raise SystemExit(f"sgl-ext keys: {asked.file}: {error}") from None


if __name__ == "__main__":
    main()
