"""The API key file: which tenant a key belongs to, and the limits of each tenant.

    [tenants.alice]                     # optional: without it there are no limits
    requests-per-minute = 60
    tokens-per-minute = 200000          # prompt tokens that are computed, and output tokens
    admin = false                       # true: may administer and act for other tenants

    [tenants.alice.models.large]        # optional: limits of what this model answers, beside those
    requests-per-minute = 10

    [keys.3fa1b2c4]                     # the name to revoke it by; the file has only the key's hash
    tenant = "alice"
    sha256 = "..."
    created = 2026-01-31T12:00:00Z
    expires = 2027-01-31T12:00:00Z      # optional, as are the following: from then on it is refused
    requests-at-once = 8
    requests-per-month = 10000          # its budget, for each month of UTC
    tokens-per-month = 50000000         # as tokens-per-minute

A key is 256 random bits, so its hash cannot be reversed by guessing, and one fast round of
SHA-256 is enough; slow hashes are for passwords that people choose. A key is looked up by
its hash, so the time of a lookup reveals nothing about the characters of any key.

No message shows a value of the file, because somebody may have put a key there.
"""

import hashlib
import math
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from sgl_ext.wire.headers import TENANT_NAME

_KEY_NAME = re.compile(r"[A-Za-z0-9_-]{1,16}")
# Names of this form cannot be keys, so messages may show them.
_SHOWN = {"keys": re.compile(r"[0-9a-f]{8}"), "tenants": re.compile(r"[A-Za-z0-9._-]{1,24}")}
_PerMinute = Annotated[float, Meta(gt=0, le=1e15)]
_PerMonth = Annotated[int, Meta(gt=0, le=1 << 53)]


class KeysError(ValueError):
    """A key file that cannot be used. The message names the place and shows no value."""


class MinuteLimits(Struct, frozen=True):
    """What may be used in a minute; None is no limit."""

    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None


class Allowance(MinuteLimits, frozen=True):
    """A tenant's limits; None is no limit.

    admin: whether it may administer and send requests for other tenants.
    models: limits of what one model answers, by the model's name.
    """

    admin: bool = False
    models: dict[str, MinuteLimits] = {}


class ApiKey(Struct, frozen=True):
    """A key's tenant and limits; None is no limit.

    name: of its table, to revoke it by.
    requests_at_once: which its clients may have running in one balancer.
    """

    tenant: Annotated[str, Meta(pattern=TENANT_NAME.pattern)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created: Any = None
    note: Any = None
    expires: Any = None  # a date, or a date and time
    requests_at_once: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    requests_per_month: _PerMonth | None = None
    tokens_per_month: _PerMonth | None = None
    name: str = ""

    @property
    def expires_s(self) -> float:
        """When it expires, in seconds since 1970. A time without a zone is UTC."""
        expires: date | None = self.expires
        if expires is None:
            return math.inf
        if not isinstance(expires, datetime):
            expires = datetime(expires.year, expires.month, expires.day)
        return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()


_Table = TypeVar("_Table", Allowance, ApiKey)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a file.

    by_hash: keys by their SHA-256, in hexadecimal digits.
    tenants: all tenants that the file names.
    """

    by_hash: Mapping[str, ApiKey] = field(default_factory=dict, repr=False)
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    tenants: frozenset[str] = frozenset()

    def find(self, key: bytes) -> ApiKey | None:
        """What the file says of a key; None if it does not have the key."""
        return self.by_hash.get(hash_of(key))

    def tenant_of(self, key: bytes) -> str | None:
        """The tenant of a key; None if the file does not have the key."""
        found = self.find(key)
        return None if found is None else found.tenant

    def only(self, hashes: frozenset[str] | None) -> "KeyFile":
        """This content with the keys of these hashes only; None: all of them."""
        if hashes is None:
            return self
        return replace(self, by_hash={h: key for h, key in self.by_hash.items() if h in hashes})

    def allowance(self, tenant: str) -> Allowance:
        """The tenant's limits; none if the file does not have the tenant."""
        return self.allowances.get(tenant) or Allowance()


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
    tables = _tables(document, "tenants", TENANT_NAME, Allowance)
    allowances = {name: allowance for _, name, allowance in tables}
    keys: dict[str, ApiKey] = {}
    for place, name, key in _tables(document, "keys", _KEY_NAME, ApiKey):
        is_new = key.sha256 not in keys
        _require(is_new, f"{place}.sha256", "is also the hash of another entry")
        is_time = key.expires is None or isinstance(key.expires, date)
        _require(is_time, f"{place}.expires", "must be a date, or a date and time, without quotes")
        keys[key.sha256] = msgspec.structs.replace(key, name=name)
    tenants = frozenset(allowances) | {key.tenant for key in keys.values()}
    return KeyFile(keys, allowances, tenants)


def _tables(
    document: Mapping[str, Any], kind: str, pattern: re.Pattern[str], table_type: type[_Table]
) -> Iterator[tuple[str, str, _Table]]:
    """The tables of one kind: the place of each for messages, its name, its content."""
    entries = document.get(kind, {})
    _require(isinstance(entries, dict), kind, "must be a table of tables")
    for number, (name, table) in enumerate(entries.items(), start=1):
        is_shown = _SHOWN[kind].fullmatch(name) is not None
        place = f"{kind}.{name}" if is_shown else f"{kind}: entry {number}"
        _require(isinstance(table, dict), place, "must be a table")
        _require(pattern.fullmatch(name) is not None, place, "has an invalid name")
        fields = _fields(place, table, table_type)
        if isinstance(models := fields.get("models"), dict):
            fields["models"] = {
                model: _fields(f"{place}.models", limits, MinuteLimits)
                for model, limits in models.items()
            }
        try:
            yield place, name, msgspec.convert(fields, table_type)
        except msgspec.ValidationError as error:
            reason, _, at = str(error).partition(" - at `$")
            raise KeysError(f"{place}{at.rstrip('`')}: {reason}") from None


def _fields(place: str, table: Any, table_type: type[Struct]) -> dict[str, Any]:
    """A table's values by the names of fields."""
    _require(isinstance(table, dict), place, "must be a table")
    fields = {key.replace("-", "_"): value for key, value in table.items()}
    for key in fields:
        is_field = key in table_type.__struct_fields__ and key != "name"
        _require(is_field, f"{place}.{_shown(key)}", f"is not a field of {place.partition('.')[0]}")
    return fields


def _shown(name: str) -> str:
    """A field's name for a message, or "..." if it could be a key."""
    return name if re.fullmatch(r"[a-z_-]{1,24}", name) else "..."


def _require(condition: bool, place: str, reason: str) -> None:
    if not condition:
        raise KeysError(f"{place}: {reason}")
