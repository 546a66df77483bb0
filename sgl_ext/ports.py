"""Finds free TCP ports."""

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sgl_ext.settings.schema import BalancerSettings, SettingsError, Unavailable


def require_free(host: str, port: int) -> None:
    """Raises Unavailable if no process can listen on the port now."""
    require_port(port, f"port={port}", host)


def require_port(port: int, name: str, host: str = "") -> None:
    """Raises Unavailable, which begins with `name`, if no process can listen on the port now.

    host: "" for every address of this machine.
    """
    if error := _fault(host, port):
        owner = port_owner(port) if error.errno == errno.EADDRINUSE else ""
        by = f" by {owner}" if owner else ""
        reason = error.strerror if error.errno is None else os.strerror(error.errno)
        where = "" if name.endswith(str(port)) else f"port {port}: "
        raise Unavailable(f"{name}: {where}{reason}{by}")


def free_ports(
    first: int, count: int, host: str = "127.0.0.1", beside: Sequence[int] = ()
) -> list[int]:
    """The first free ports of an address of this machine, from `first` on.

    beside: the distances to further ports that the user of each needs, on every address; no two
    users share one.
    Raises SettingsError for an address that is not this machine's.
    """
    if error := _fault(host, 0):
        raise SettingsError(f"engine_host={host!r}: {error.strerror}")
    ports: list[int] = []
    taken: set[int] = set()
    for port in range(first, 65536 - max(beside, default=0)):
        if len(ports) == count:
            break
        further = [port + distance for distance in beside]
        if not taken.isdisjoint((port, *further)) or _fault(host, port):
            continue
        if not any(_fault("", one) for one in further):
            ports.append(port)
            taken.update((port, *further))
    if len(ports) < count:
        raise SettingsError(f"instances={count}: from port {first} on only {len(ports)} are free")
    return ports


def _fault(host: str, port: int) -> OSError | None:
    """Why no process can listen there now."""
    try:
        with socket.create_server((host, port), family=_family(host)):
            return None
    except OSError as error:
        return error


def reachable(host: str, port: int) -> str:
    """HOST:PORT at which this machine reaches what listens on an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def base_url(settings: BalancerSettings) -> str:
    """The URL at which this machine reaches a balancer."""
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{reachable(settings.host, settings.port)}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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
