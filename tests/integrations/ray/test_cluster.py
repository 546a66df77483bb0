"""Refusals of a Ray cluster, without one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from sgl_ext.integrations.ray.cluster import Cluster, FleetError

MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.55.1
    Python: 3.11.7
This process was started with:
    Ray: 2.60.0
"""


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("", 0)) as server:  # Ray uses the machine's own address
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("error", [RuntimeError(MISMATCH), ConnectionError("not a node")])
def test_what_ray_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, listener: str, error: Exception
) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(FleetError) as refused:
        Cluster(listener, "sgl-ext")
    message = str(refused.value)
    assert message.startswith(f"ray_address='{listener}': ")
    assert "\n" not in message
    assert "Ray: 2.55.1" in message or "not a node" in message
