"""Where responses and contexts are stored: an SQLite file, or a server that balancers share.

    .run/store.sqlite, :memory:
    redis://HOST:PORT/DB, rediss:// (TLS), valkey://, valkeys://
    postgresql://USER@HOST:PORT/DATABASE
    env:VARIABLE, file:PATH      the address is there, and may have a password

A command line is shown by `ps`, and settings are shown in errors: so a URL with a password is
accepted only from a variable or a file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

from sgl_ext.settings.schema import SettingsError

_KINDS = {
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
    "postgresql": "postgresql",
    "postgres": "postgresql",
}
_FORMS = "must be a path, redis[s]://, valkey[s]:// or postgresql://HOST, env:VARIABLE or file:PATH"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """kind: "sqlite", "redis" or "postgresql".
    url: the path or the URL with its password, which is never shown.
    shown: as messages name it.
    """

    kind: str
    url: str = field(repr=False)
    shown: str

    @property
    def is_shared(self) -> bool:
        """Whether balancers on other machines can use it, too."""
        return self.kind != "sqlite"


def read_store(store: str, environ: Mapping[str, str] = os.environ) -> StoreAddress:
    """The store that a setting names. Raises SettingsError, which shows no password."""
    source, _, name = store.partition(":")
    if source not in ("env", "file") or not name:
        return _address(store, _shown(store), may_have_password=False)
    try:
        found = (Path(name).read_text() if source == "file" else environ[name]).strip()
    except (OSError, KeyError, ValueError) as error:
        reason = "it is not set" if isinstance(error, KeyError) else error
        raise SettingsError(f"store={store!r}: cannot be read: {reason}") from None
    if not found:
        raise SettingsError(f"store={store!r}: is empty")
    return _address(found, store, may_have_password=True)


def _address(url: str, shown: str, *, may_have_password: bool) -> StoreAddress:
    scheme, separator, _ = url.partition("://")
    if not separator:
        return StoreAddress("sqlite", url, shown)
    kind = _KINDS.get(scheme)
    try:
        parts = urlsplit(url)
        is_valid = kind is not None and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or kind is None:
        raise SettingsError(f"store={shown!r}: {_FORMS}")
    named = [name for name in parse_qs(parts.query) if "password" in name.lower()]
    if not may_have_password and (parts.password is not None or named):
        reason = "a password may not stand here, where others can read it: give env: or file:"
        raise SettingsError(f"store={shown!r}: {reason}")
    if kind == "redis" and not parts.path.strip("/").isdigit() and parts.path.strip("/"):
        raise SettingsError(f"store={shown!r}: its path must be the number of a database")
    # redis-py knows Valkey's schemes by Redis' names.
    return StoreAddress(kind, url.replace("valkey", "redis", 1) if kind == "redis" else url, shown)


def _shown(url: str) -> str:
    """A URL without its password and parameters; anything else as it is."""
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        user = user.partition(":")[0] + ":..." if ":" in user else user
        return urlunsplit((parts.scheme, user + at + host, parts.path, "", ""))
    except ValueError:
        return url.partition("://")[0] + "://..."
