"""What several test folders share: the local model, and a running node of real engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from bench._node import Node, local_model, running_node

# Engines may be starting beside a property test: its speed is no assertion.
hypothesis.settings.register_profile("sgl_ext", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("sgl_ext")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The tiny local model, made once a checkout."""
    return local_model("tiny")


@pytest.fixture(scope="session")
def node(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two real engines behind a balancer, for tests that leave them standing."""
    with running_node(
        tiny_model, tmp_path_factory.mktemp("node"), "--instances", "2", "--diagnose"
    ) as started:
        yield started
