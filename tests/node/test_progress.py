"""The panel that the launcher leaves on the screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sgl_ext.node.children import make_children
from sgl_ext.node.hardware import Hardware
from sgl_ext.node.ports import free_ports
from sgl_ext.node.progress import summary
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings


def test_the_panel_shows_an_address_that_a_client_can_use(tmp_path: Path) -> None:
    (port,) = free_ports(20_000, 1)
    for host, address in (("::", f"http://[::1]:{port}"), ("0.0.0.0", f"http://127.0.0.1:{port}")):
        balancer = BalancerSettings(host=host, port=port)
        settings = LaunchSettings(model_path="m", log_dir=str(tmp_path), balancer=balancer)
        engines, child, _ = make_children(settings, Hardware(()))
        console = Console(width=200, file=(tmp_path / "out").open("w"))
        with console.file:
            console.print(summary(settings, engines, child.url))
        assert f"ANTHROPIC_BASE_URL={address} " in (tmp_path / "out").read_text()
