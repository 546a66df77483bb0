"""Ports that are used, and by whom."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sgl_ext import ports
from sgl_ext.ports import free_ports, port_owner, require_free
from sgl_ext.settings.schema import SettingsError


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_used_port_names_the_process_that_has_it(host: str, family: socket.AddressFamily) -> None:
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with pytest.raises(SettingsError) as refused:
            require_free(host, port)
    start = f"port={port}: Address already in use by process {os.getpid()}: "
    assert str(refused.value).startswith(start)
    require_free(host, port)


def test_a_process_that_cannot_be_looked_at_is_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    line = "0: 0100007F:7530 00000000:0000 0A 0:0 00:0 0 1000 0 12345 1 0 100"
    (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n {line}\n")
    assert port_owner(30_000, tmp_path) == "a process of another user"
    assert port_owner(30_001, tmp_path) == ""


def test_too_few_free_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"instances=7: from port 65531 on only \d are free"):
        free_ports(65_531, 7)
    assert ports.reachable("0.0.0.0", 1) == "127.0.0.1:1"
