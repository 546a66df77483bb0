"""Finds free TCP ports."""

import errno
import os
import socket
from contextlib import suppress

from sgl_ext.node.start.port_owner import port_owner
from sgl_ext.settings.schema import SettingsError


def require_free(host: str, port: int) -> None:
    """Raises SettingsError if no process can listen on the port now."""
    try:
        with socket.create_server((host, port), family=_family(host)):
            pass
    except OSError as error:
        owner = port_owner(port) if error.errno == errno.EADDRINUSE else ""
        by = f" by {owner}" if owner else ""
        raise SettingsError(f"port={port}: {os.strerror(error.errno or 0)}{by}") from None


def free_ports(first: int, count: int, host: str = "127.0.0.1") -> list[int]:
    """The first free ports of an address of this machine, from `first` on.

    Raises SettingsError for an address that is not this machine's.
    """
    try:
        with socket.create_server((host, 0), family=_family(host)):
            pass
    except OSError as error:
        raise SettingsError(f"engine_host={host!r}: {error.strerror}") from None
    ports: list[int] = []
    for port in range(first, 65536):
        if len(ports) == count:
            break
        with suppress(OSError), socket.create_server((host, port), family=_family(host)):
            ports.append(port)
    if len(ports) < count:
        raise SettingsError(f"instances={count}: from port {first} on only {len(ports)} are free")
    return ports


def reachable(host: str, port: int) -> str:
    """HOST:PORT at which this machine reaches what listens on an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
