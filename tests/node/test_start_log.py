"""What the logs of a node that has started hold."""

from __future__ import annotations

import pytest
from sgl_ext_cpu.node import Node

NOISE = ("is deprecated, please use", "freeze_gc failed", "Traceback")


def test_an_engines_log_is_short_lines_and_no_false_alarm(node: Node) -> None:
    # Tests that came before this one have made the engine log their clients' errors, too.
    text, _, _ = (node.log_dir / "engine-0.log").read_text().partition("fired up")
    assert [line for line in text.splitlines() if len(line) > 4000] == []
    assert [noise for noise in NOISE if noise in text] == []
    assert "server_args={'model_path'" in text


@pytest.mark.parametrize("name", ["launcher", "balancer"])
def test_launcher_and_balancer_begin_their_logs_with_versions_and_settings(
    node: Node, name: str
) -> None:
    first, second, *_ = (node.log_dir / f"{name}.log").read_text().splitlines()
    assert "INFO starting sgl_ext=" in first
    assert "INFO settings other than the defaults" in second
    assert f"port={node.url.rsplit(':', 1)[1]}" in second


def test_the_balancer_logs_each_engine_that_becomes_ready(node: Node) -> None:
    text = (node.log_dir / "balancer.log").read_text()
    assert text.count("INFO engine ready engine=engine-") >= len(node.engines)
