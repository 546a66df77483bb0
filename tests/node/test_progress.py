"""The panel that the launcher leaves on the screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sgl_ext.node.child import Child
from sgl_ext.node.children import make_children
from sgl_ext.node.hardware import Hardware
from sgl_ext.node.progress import start_progress, summary
from sgl_ext.ports import free_ports
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
        shown = (tmp_path / "out").read_text()
        assert f"sgl-ext clients claude-code --run --url {address}, " in shown
        assert f"sgl-ext status --url {address}, or {address}/ in a browser" in shown


def test_without_a_terminal_each_change_is_a_line_with_the_time_that_has_passed(
    tmp_path: Path,
) -> None:
    log = tmp_path / "engine.log"
    child = Child("engine-0", [], {}, log, "")
    now_s = [100.0]
    out = tmp_path / "out"
    with (
        out.open("w") as file,
        start_progress(Console(file=file), [child], lambda: now_s[0]) as show,
    ):
        show(set())
        now_s[0] += 7
        log.write_text(
            "[2026-01-01 00:00:07] sgl-ext: parsers [x] found\n"
            "Load weight begin\nLoading safetensors checkpoint shards:  25% Completed"
        )
        show(set())
        show(set())
        now_s[0] += 60
        show({"engine-0"})
    assert [line.strip() for line in out.read_text().splitlines()] == [
        "0 s  engine-0: importing",
        "engine-0: parsers [x] found",
        "7 s  engine-0: loading weights 25%",
        "67 s  engine-0: ready",
    ]
