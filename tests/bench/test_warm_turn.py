"""The stopwatch of bench/warm_turn: stages add up to a turn, and every timed function exists."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.warm.stages import BETWEEN, FORWARD, OURS, Span, Stopwatch, medians, stages_ms

MS = 1_000_000


def test_a_moment_belongs_to_the_span_that_began_last() -> None:
    spans = [
        Span(0, 10 * MS, "route"),
        Span(2 * MS, 5 * MS, "parse"),
        Span(3 * MS, 4 * MS, "segments"),
        Span(12 * MS, 30 * MS, "forward"),
    ]
    found = stages_ms(spans, 1 * MS, 20 * MS)
    assert found == {"route": 6.0, "parse": 2.0, "segments": 1.0, BETWEEN: 2.0, "forward": 8.0}


def test_a_second_forward_pass_does_not_count() -> None:
    spans = [
        Span(0, 4 * MS, FORWARD),
        Span(5 * MS, 12 * MS, FORWARD),
        Span(6 * MS, 8 * MS, "stream"),
    ]
    assert stages_ms(spans, 0, 10 * MS) == {FORWARD: 4.0, "stream": 2.0, BETWEEN: 4.0}


moments = st.integers(0, 50)
spans = st.builds(
    lambda begin, size, stage: Span(begin, begin + size, stage),
    moments,
    moments,
    st.sampled_from("abc"),
)


@given(st.lists(spans, max_size=8), moments, moments)
def test_stages_add_up_to_the_turn(spans: list[Span], begin: int, size: int) -> None:
    found = stages_ms(sorted(spans), begin, begin + size)
    assert sum(found.values()) == pytest.approx(size / 1e6)


def test_a_stage_that_a_turn_lacks_counts_as_zero() -> None:
    assert medians([{"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 4.0}]) == {"a": 3.0, "b": 0.0}


MODULE = """
import asyncio

class Thing:
    def plain(self): return 1
    @staticmethod
    def static(): return 2
    @classmethod
    def of_class(cls): return cls.__name__
    async def waits(self):
        await asyncio.sleep(0.001)
        return 4
"""
USE = """
import asyncio, time
from timed_thing import Thing
found = [Thing().plain(), Thing.static(), Thing.of_class(), asyncio.run(Thing().waits())]
assert found == [1, 2, "Thing", 4], found
"""


def run(folder: Path, symbols: Mapping[str, str]) -> Stopwatch:
    (folder / "timed_thing.py").write_text(MODULE)
    watch = Stopwatch(folder / "watch", symbols)
    path = os.pathsep.join([watch.environment["PYTHONPATH"], str(folder)])
    environment = {**os.environ, **watch.environment, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", USE], env=environment, check=True)
    return watch


def test_timed_functions_still_do_what_they_did(tmp_path: Path) -> None:
    names = ("plain", "static", "of_class", "waits")
    watch = run(tmp_path, {f"timed_thing:Thing.{name}": f"the {name}" for name in names})
    (waited,) = [span for span in watch.spans() if span.stage == "the waits"]
    assert waited.end_ns - waited.begin_ns >= MS


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    watch = run(tmp_path, {"timed_thing:Thing.absent": "nothing"})
    with pytest.raises(RuntimeError, match=r"timed_thing:Thing\.absent"):
        watch.spans()


@pytest.mark.parametrize("symbol", OURS)
def test_our_timed_functions_exist(symbol: str) -> None:
    module, _, path = symbol.partition(":")
    assert callable(attrgetter(path)(import_module(module)))
