"""The write-ahead log of an SQLite file, which is moved into the file outside of queries."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

BUSY_S = 1.0
"""How long a connection waits for another one's lock."""
LONG_BYTES = 4 << 20
LIMIT_BYTES = 64 << 20


class WriteAheadLog:
    """The log of the file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def checkpoint_if_long(self) -> None:
        """Moves a long log into the file. Any thread may call it, and it waits for the disk."""
        if self._bytes() > LONG_BYTES:
            self._checkpoint()

    def require_room(self) -> None:
        """Empties a log that has reached its limit: a burst of large documents fills it before the
        next `checkpoint_if_long`. Raises sqlite3.OperationalError if a reader prevents that."""
        if self._bytes() > LIMIT_BYTES:
            self._checkpoint()
            if self._bytes() > LIMIT_BYTES:
                raise sqlite3.OperationalError("its write-ahead log is full")

    def _checkpoint(self) -> None:
        file = f"{self._path.absolute().as_uri()}?mode=rw"  # which makes no file
        with closing(sqlite3.connect(file, timeout=BUSY_S, uri=True)) as db:
            db.execute(f"PRAGMA journal_size_limit = {LONG_BYTES}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            if self._bytes() > LIMIT_BYTES:
                # Writers fill the log faster than it empties; this makes them wait.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # The first write to an empty log waits for the disk. This thread makes that write.
            with db:
                db.execute(f"PRAGMA user_version = {int(time.monotonic())}")

    def _bytes(self) -> int:
        try:
            return Path(f"{self._path}-wal").stat().st_size
        except FileNotFoundError:
            return 0
