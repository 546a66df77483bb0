"""The API key file: which tenant a key belongs to, and the limits of each tenant.

    [tenants.alice]                     # optional: without it there are no limits
    requests_per_minute = 60
    tokens_per_minute = 200000          # prompt tokens that are computed, and output tokens
    admin = false                       # true: may administer and act for other tenants

    [keys.3fa1b2c4]                     # the name to revoke it by; the file has only the key's hash
    tenant = "alice"
    sha256 = "..."
    created = 2026-01-31T12:00:00Z

A key is 256 random bits, so its hash cannot be reversed by guessing, and one fast round of
SHA-256 is enough; slow hashes are for passwords that people choose. A key is looked up by
its hash, so the time of a lookup reveals nothing about the characters of any key.

No message shows a value of the file, because somebody may have put a key there.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_ext.requests.session import TENANT_NAME

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY_NAME = re.compile(r"[A-Za-z0-9_-]{1,16}")
# Names of this form cannot be keys, so messages may show them.
_SHOWN = {"keys": re.compile(r"[0-9a-f]{8}"), "tenants": re.compile(r"[A-Za-z0-9._-]{1,24}")}
_KEY_FIELDS = {"tenant", "sha256", "created", "note"}
_LIMITS = ("requests_per_minute", "tokens_per_minute")


class KeysError(ValueError):
    """A key file that cannot be used. The message names the place and shows no value."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A tenant's limits; None is no limit.

    admin: whether it may administer and send requests for other tenants.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    admin: bool = False


NO_LIMIT = Allowance()


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a file.

    tenants_by_hash: tenants by the SHA-256 of their keys, in hexadecimal digits.
    tenants: all tenants that the file names.
    """

    tenants_by_hash: Mapping[str, str] = field(default_factory=dict, repr=False)
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    tenants: frozenset[str] = frozenset()

    def tenant_of(self, key: bytes) -> str | None:
        """The tenant of a key, None if the file does not have the key."""
        offered = hash_of(key)
        for found in self.tenants_by_hash.keys() & {offered}:
            if hmac.compare_digest(found, offered):
                return self.tenants_by_hash[found]
        return None

    def allowance(self, tenant: str) -> Allowance:
        return self.allowances.get(tenant, NO_LIMIT)


def new_key() -> str:
    """A random key."""
    return "sgl-" + secrets.token_urlsafe(32)


def hash_of(key: bytes) -> str:
    """The hash that the file has of a key."""
    return hashlib.sha256(key).hexdigest()


def read_keys(path: Path) -> KeyFile:
    """Reads a file. Raises KeysError if it cannot be read or is malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise KeysError(f"cannot be read: {what}") from None
    return parse_keys(text)


def parse_keys(text: str) -> KeyFile:
    """Parses the text of a file. Raises KeysError if it is malformed."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at [^()]*\)\Z", str(error))
        raise KeysError(f"not TOML {where[0] if where else ''}".rstrip()) from None
    for name in document:
        _require(name in ("keys", "tenants"), _shown(name), "must be keys or tenants")
    allowances = {}
    for place, name, table in _tables(document, "tenants", TENANT_NAME):
        allowances[name] = _allowance(place, table)
    tenants = {}
    for place, _, table in _tables(document, "keys", _KEY_NAME):
        for key in table:
            _require(key in _KEY_FIELDS, f"{place}.{_shown(key)}", "is not a field of a key")
        owner, digest = table.get("tenant"), table.get("sha256")
        is_name = isinstance(owner, str) and TENANT_NAME.fullmatch(owner) is not None
        _require(is_name, f"{place}.tenant", "must be a tenant's name")
        is_hash = isinstance(digest, str) and _SHA256.fullmatch(digest) is not None
        _require(is_hash, f"{place}.sha256", "must be 64 lower-case hexadecimal digits")
        _require(digest not in tenants, f"{place}.sha256", "is also the hash of another entry")
        tenants[str(digest)] = str(owner)
    return KeyFile(tenants, allowances, frozenset(allowances) | frozenset(tenants.values()))


def _tables(
    document: Mapping[str, Any], kind: str, pattern: re.Pattern[str]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The tables of one kind: the place of each for messages, its name, its content."""
    entries = document.get(kind, {})
    _require(isinstance(entries, dict), kind, "must be a table of tables")
    for number, (name, table) in enumerate(entries.items(), start=1):
        is_shown = _SHOWN[kind].fullmatch(name) is not None
        place = f"{kind}.{name}" if is_shown else f"{kind}: entry {number}"
        _require(isinstance(table, dict), place, "must be a table")
        _require(pattern.fullmatch(name) is not None, place, "has an invalid name")
        yield place, name, table


def _allowance(place: str, table: Mapping[str, Any]) -> Allowance:
    values = {name.replace("-", "_"): value for name, value in table.items()}
    for name, value in values.items():
        at = f"{place}.{_shown(name)}"
        _require(name == "admin" or name in _LIMITS, at, "is not a field of a tenant")
        if name == "admin":
            _require(isinstance(value, bool), at, "must be true or false")
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(is_number and 0 < value < float("inf"), at, "must be a positive number")
    return Allowance(**values)


def _shown(name: str) -> str:
    """A field's name for a message, or "..." if it could be a key."""
    return name if re.fullmatch(r"[a-z_-]{1,24}", name) else "..."


def _require(condition: bool, place: str, reason: str) -> None:
    if not condition:
        raise KeysError(f"{place}: {reason}")
