"""Secrets, and addresses that may hold one: the file or the variable that they are read from.

An `EngineSecret` is what a balancer and its engines share, so that an engine knows its balancer. It
has one line, or several while it is being changed: a balancer sends the first, and an engine
accepts each. An engine believes a client that has it as it believes a balancer.

A `StoreAddress` is where responses and contexts are stored: an SQLite file, or a server that
balancers share.

    .run/store.sqlite, :memory:
    redis://HOST:PORT/DB, rediss:// (TLS), valkey://, valkeys://
    postgresql://USER@HOST:PORT/DATABASE
    env:VARIABLE, file:PATH      the address is there, and may have a password

A command line is shown by `ps`, and settings are shown in errors: so a URL with a password is
accepted only from a variable or a file.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

from sgl_ext.settings.schema import SettingsError


def read_source(setting: str, source: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text in the file or variable that `source` names, without blanks around it.

    Raises SettingsError, which names the setting and never shows the secret.
    """
    kind, _, name = source.partition(":")
    if kind not in ("file", "env") or not name:
        # The value is not shown: someone may have put the secret itself here.
        raise SettingsError(f"{setting}: must be file:PATH or env:VARIABLE")
    try:
        text = Path(name).read_text() if kind == "file" else environ[name]
    except KeyError:
        give = f"export {name}=..., or give file:PATH"
        unset = f"cannot be read: the variable is not set; {give}"
        raise SettingsError(f"{setting}={source!r}: {unset}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "not text" if isinstance(error, UnicodeDecodeError) else error
        raise SettingsError(f"{setting}={source!r}: cannot be read: {reason}") from None
    if not text.strip():
        raise SettingsError(f"{setting}={source!r}: is empty")
    return text.strip()


def read_api_key(source: str | None) -> str | None:
    """The key in the file or variable that `source` names. Raises SettingsError."""
    return None if source is None else read_source("api_key", source)


def file_version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file is written or replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


NO_SECRET = "none"
"""What a balancer without a secret sends in place of one, so that an engine with one refuses it."""
_LINE = re.compile(r"[!-~]{16,256}")
_MAX_LINES = 4


class EngineSecret:
    """The secret as it was last read.

    accepted: its lines; () if there is no secret.
    """

    def __init__(self, source: str | None) -> None:
        """source: the setting `engine-secret`. Raises SettingsError."""
        self._source = source
        kind, _, name = (source or "").partition(":")
        self._file = Path(name) if kind == "file" else None
        self._version = self._file and file_version(self._file)
        self.accepted = self._read()

    @property
    def sent(self) -> str:
        """The line that a balancer sends."""
        return self.accepted[0] if self.accepted else NO_SECRET

    def reload_if_changed(self) -> bool:
        """Whether the file had changed and was read again.

        Raises SettingsError once for a change that cannot be used; the earlier lines stay.
        """
        version = self._file and file_version(self._file)
        if version == self._version:
            return False
        self._version = version
        self.accepted = self._read()
        return True

    def _read(self) -> tuple[str, ...]:
        if self._source is None:
            return ()
        lines = [line.strip() for line in read_source("engine_secret", self._source).splitlines()]
        lines = [line for line in lines if line]
        problem = f"must have at most {_MAX_LINES} lines" if len(lines) > _MAX_LINES else ""
        if not all(map(_LINE.fullmatch, lines)):
            problem = "each line must be 16 to 256 printable ASCII characters without a blank"
        if problem:
            raise SettingsError(f"engine_secret={self._source!r}: {problem}")
        return tuple(lines)


def is_reachable(host: str) -> bool:
    """Whether other machines can reach what listens at this address or name."""
    if host == "localhost":
        return False
    try:
        return not ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which a DNS server may point anywhere
        return True


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
    kind, _, name = store.partition(":")
    if kind not in ("env", "file") or not name:
        return _address(store, _shown(store), may_have_password=False)
    return _address(read_source("store", store, environ), store, may_have_password=True)


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
