"""Every bench runs in its smallest form, holds its invariants and ends in one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
from sgl_ext_cpu.node import FORKING, ROOT
from sgl_ext_cpu.nursery import Nursery

WITHOUT_ENGINES = ("index", "proxy", "routing", "tool_loop")
WITH_ENGINES = (
    *("fanout", "header_strip", "pin_flood", "priority", "speculative_prefill"),
    *("warm_turn", "decode", "restarts", "compaction"),
)
# Benches of several files, with engines.
PACKAGES = ("recorded",)
TIMED = ("warm_turn",)

Bench = Callable[[str], dict[str, object]]


def run_smallest(name: str, environment: Mapping[str, str] | None = None) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--smallest"],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.fixture
def bench_with_engines(nursery: Nursery) -> Bench:
    # These time the functions of modules that their engines import themselves.
    return lambda name: run_smallest(
        name, FORKING if name in TIMED else {**FORKING, **nursery.environment}
    )


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_ENGINES)
def test_a_bench_without_engines_holds_its_invariants(name: str) -> None:
    assert run_smallest(name)["bench"] == name


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITH_ENGINES, *PACKAGES])
def test_a_bench_of_engines_holds_its_invariants(name: str, bench_with_engines: Bench) -> None:
    assert bench_with_engines(name)["bench"] == name


def test_no_bench_is_left_out() -> None:
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__init__"}
    assert scripts == {*WITHOUT_ENGINES, *WITH_ENGINES}
