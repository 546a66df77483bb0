"""Reloads the API key file when it changes. An invalid change leaves the earlier keys in force."""

from __future__ import annotations

import logging
from pathlib import Path

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.key_file import KeyFile, KeysError, read_keys

log = logging.getLogger(__name__)


class KeyFileReloader:
    """`keys` is the last valid content. The constructor raises KeysError if there is none."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._version = _version(path)
        self.keys: KeyFile = read_keys(path)
        self._reloads = metrics.counter(
            "key_file_reloads", "Changes of the API key file that were applied."
        )
        self._failures = metrics.counter(
            "key_file_reload_failures",
            "Changes of the API key file that were not applied because it was unreadable or wrong.",
        )

    def reload_if_changed(self) -> bool:
        """Whether new content was loaded. Call this periodically."""
        version = _version(self._path)
        if version == self._version:
            return False
        self._version = version
        try:
            self.keys = read_keys(self._path)
        except KeysError as error:
            log.error("keys=%s: %s; the earlier keys stay valid", self._path, error)
            self._failures.inc()
            return False
        log.info("keys=%s: reloaded", self._path)
        self._reloads.inc()
        return True


def _version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file is written or replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
