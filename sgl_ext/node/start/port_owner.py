"""Which process listens on a TCP port, as far as /proc tells this user."""

import os
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"
_LONGEST = 80


def port_owner(port: int, proc: Path = Path("/proc")) -> str:
    """The listener's process id and command line in words; "" if it is not known."""
    inodes = {f"socket:[{inode}]" for inode in _listeners(port, proc)}
    if not inodes:
        return ""
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # another user's, or one that has ended
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) in inodes:
                        return _named(process)
    return "a process of another user"


def _listeners(port: int, proc: Path) -> set[str]:
    """The inodes of the sockets that listen on the port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found


def _named(process: Path) -> str:
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    shown = command.strip() or (process / "comm").read_text().strip()
    cut = f"{shown[:_LONGEST]}..." if len(shown) > _LONGEST else shown
    return f"process {process.name}: {cut}"
