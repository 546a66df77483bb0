"""The secret that a balancer and its engines share, so that an engine knows its balancer.

It has one line, or several while it is being changed: a balancer sends the first, and an engine
accepts each. An engine believes a client that has it as it believes a balancer.
"""

import re
from ipaddress import ip_address
from pathlib import Path

from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.secret_source import file_version, read_source

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
