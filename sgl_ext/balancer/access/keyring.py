"""The file of API keys as it is now: read again when it has changed, kept when it is broken."""

from __future__ import annotations

import logging
from pathlib import Path

from sgl_ext.balancer.metrics.counters import Counter
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.key_file import KeyFile, KeysError, read_keys

log = logging.getLogger(__name__)


class Keyring:
    """Call `look` now and then. The first reading raises KeysError, later ones keep what is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _stamp(path)
        self.file: KeyFile = read_keys(path)
        self._reloads: Counter | None = None
        self._faults: Counter | None = None

    def count_in(self, metrics: Metrics) -> None:
        """Counts from now on."""
        self._reloads = metrics.counter(
            "key_file_reloads", "Changes of the API key file that were applied."
        )
        self._faults = metrics.counter(
            "key_file_reload_failures",
            "Changes of the API key file that were not applied because it was unreadable or wrong.",
        )

    def look(self) -> bool:
        """Whether other keys hold now than did before."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.file = read_keys(self._path)
        except KeysError as error:
            log.error("keys=%s: %s; the keys read before go on to hold", self._path, error)
            if self._faults is not None:
                self._faults.inc()
            return False
        log.info("keys=%s: read again", self._path)
        if self._reloads is not None:
            self._reloads.inc()
        return True


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What differs when a file was written or replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
