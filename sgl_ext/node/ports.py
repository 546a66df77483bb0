"""Finds free TCP ports."""

import errno
import os
import socket
from collections.abc import Sequence

from sgl_ext.node.start.port_owner import port_owner
from sgl_ext.settings.schema import SettingsError


def require_free(host: str, port: int) -> None:
    """Raises SettingsError if no process can listen on the port now."""
    require_port(port, f"port={port}", host)


def require_port(port: int, name: str, host: str = "") -> None:
    """Raises SettingsError, which begins with `name`, if no process can listen on the port now.

    host: "" for every address of this machine.
    """
    if error := _fault(host, port):
        owner = port_owner(port) if error.errno == errno.EADDRINUSE else ""
        by = f" by {owner}" if owner else ""
        reason = error.strerror if error.errno is None else os.strerror(error.errno)
        where = "" if name.endswith(str(port)) else f"port {port}: "
        raise SettingsError(f"{name}: {where}{reason}{by}")


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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
