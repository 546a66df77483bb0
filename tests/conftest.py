"""What several test folders share: the local model, and a running node of real engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from sgl_ext_cpu.node import Node, local_model, running_node
from sgl_ext_cpu.nursery import Nursery

# Engines may be starting beside a property test: its speed is no assertion.
hypothesis.settings.register_profile("sgl_ext", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("sgl_ext")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The tiny local model, made once a checkout."""
    return local_model("tiny")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process that has imported SGLang, for tests of engines without a launcher."""
    # One thread: the model is tiny, and threads that share too few cores wait for each
    # other far longer than they work.
    with Nursery(environment={"OMP_NUM_THREADS": "1"}) as started:
        yield started


@pytest.fixture(scope="session")
def node(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two real engines behind a balancer, for tests that leave them standing."""
    with running_node(
        tiny_model, tmp_path_factory.mktemp("node"), "--instances", "2", "--diagnose"
    ) as started:
        yield started
