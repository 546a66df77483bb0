"""Engines of tests run on the CPU, also where there are GPUs and somebody has named one."""

from __future__ import annotations

import psutil
import pytest
from sgl_ext_cpu.engine_processes import find_engine
from sgl_ext_cpu.node import Node


@pytest.mark.parametrize("name", ["http", "scheduler", "detokenizer"])
def test_no_process_of_an_engine_sees_a_gpu(node: Node, name: str) -> None:
    for url in node.engines:
        process: psutil.Process = getattr(find_engine(url), name)
        assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""


def test_the_launcher_says_what_its_engines_run_on(node: Node) -> None:
    first, *_ = (node.log_dir / "launch.out").read_text().splitlines()
    assert first == "engines run on the CPU, which platform='cpu' names"
