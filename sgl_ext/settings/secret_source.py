"""Where a secret comes from: `file:PATH` or `env:VARIABLE`, never a command line."""

import os
from pathlib import Path

from sgl_ext.settings.schema import SettingsError


def read_source(setting: str, source: str) -> str:
    """The text in the file or variable that `source` names, without blanks around it.

    Raises SettingsError, which names the setting and never shows the secret.
    """
    kind, _, name = source.partition(":")
    if kind not in ("file", "env") or not name:
        # The value is not shown: someone may have put the secret itself here.
        raise SettingsError(f"{setting}: must be file:PATH or env:VARIABLE")
    try:
        text = Path(name).read_text() if kind == "file" else os.environ[name]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        reason = "not text" if isinstance(error, UnicodeDecodeError) else error
        raise SettingsError(f"{setting}={source!r}: cannot be read: {reason}") from None
    if not text.strip():
        raise SettingsError(f"{setting}={source!r}: is empty")
    return text.strip()


def file_version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file is written or replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
