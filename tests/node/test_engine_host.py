"""Where the launcher's engines listen, and how its balancer reaches them."""

from pathlib import Path

import pytest

from sgl_ext.node.children import make_children
from sgl_ext.node.hardware import Hardware, engine_command
from sgl_ext.ports import free_ports
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings, SettingsError


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1")],
)
def test_engines_listen_where_the_operator_says(host: str, address: str, tmp_path: Path) -> None:
    (port,) = free_ports(20_000, 1)
    balancer = BalancerSettings(port=port)
    settings = LaunchSettings(
        model_path="m", log_dir=str(tmp_path), engine_host=host, balancer=balancer
    )
    (engine,), *_ = make_children(settings, Hardware(()))
    assert engine.url.startswith(f"http://{address}:")
    command = engine_command(settings, Hardware(()), 1)
    assert command[command.index("--host") + 1] == host


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"engine_host='203\.0\.113\.9'"):
        free_ports(20_000, 1, "203.0.113.9")
