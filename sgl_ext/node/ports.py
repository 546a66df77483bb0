"""Finds free TCP ports."""

import socket
from contextlib import suppress

from sgl_ext.settings.schema import SettingsError


def require_free(host: str, port: int) -> None:
    """Raises SettingsError if no process can listen on the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        raise SettingsError(f"port={port}: {error.strerror}") from None


def free_ports(first: int, count: int) -> list[int]:
    """The first free loopback ports, from `first` on."""
    ports: list[int] = []
    for port in range(first, 65536):
        if len(ports) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports
