"""Traces that are written in Mooncake's format, read again, and described by their shape."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sgl_ext_cpu.node import ROOT

from bench.trace.agents import TRACE_BLOCK_TOKENS, TraceConfig
from bench.trace.calls import compile_calls, ideal_of
from bench.trace.mooncake import Record, lines_of, read_records
from bench.trace.options import add_trace_options, trace_of
from bench.trace.recording import ideal_share, records_of
from bench.trace.shape import shape_of
from bench.trace.variants import MOONCAKE, SHAPES, make_trace


def recorded(config: TraceConfig) -> list[Record]:
    agents = make_trace(config)
    return records_of(agents, compile_calls(agents))


def written(records: list[Record], folder: Path) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(lines_of(records)))
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_trace_that_was_written_is_read_with_the_same_ideal_share(
    shape: str, tmp_path: Path
) -> None:
    made = recorded(TraceConfig(shape, sessions=5, calls=8, scale=0.2))
    path = written(made, tmp_path)
    read = list(read_records(path))
    assert [record[:4] for record in read] == [record[:4] for record in made]
    assert ideal_share(read) == ideal_share(made)
    again = recorded(TraceConfig(MOONCAKE, sessions=10_000, file=str(path)))
    # The chat's own few tokens stand before and after each prompt.
    assert ideal_share(again) == pytest.approx(ideal_share(made), abs=0.002)
    assert [record.output_tokens for record in again] == [r.output_tokens for r in made]


def test_a_scaled_trace_keeps_its_ideal_share(tmp_path: Path) -> None:
    made = recorded(TraceConfig("published_unkind", sessions=3))
    path = str(written(made, tmp_path))
    agents = make_trace(TraceConfig(MOONCAKE, file=path, scale=0.1))
    scaled = ideal_of(agents, compile_calls(agents))
    assert scaled.prompt_tokens == pytest.approx(sum(r.input_tokens for r in made) / 10, rel=0.01)
    assert scaled.cached_ratio == pytest.approx(ideal_share(made), abs=0.005)


def test_sessions_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = recorded(TraceConfig("published_kind", sessions=5, scale=0.02))
    read = list(read_records(written(made, tmp_path)))
    pairs = {(one.chat, other.chat) for one, other in zip(made, read, strict=True)}
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) == 5


def test_records_are_in_order_and_lose_only_answers_and_short_blocks() -> None:
    agents = make_trace(TraceConfig("published_kind", sessions=10, scale=0.5))
    calls = compile_calls(agents)
    records = records_of(agents, calls)
    assert [record.at_s for record in records] == sorted(record.at_s for record in records)
    ideal = ideal_of(agents, calls)
    # Each call reads its predecessor's answer, and whole blocks alone.
    lost = ideal.output_tokens + TRACE_BLOCK_TOKENS * ideal.requests
    assert 0 <= ideal.cached_tokens - ideal_share(records) * ideal.prompt_tokens <= lost


def test_the_shape_is_that_of_the_agents() -> None:
    agents = make_trace(TraceConfig("published_unkind", sessions=6, scale=0.05))
    calls = compile_calls(agents)
    shape = shape_of(agents, calls, records_of(agents, calls))
    leads = [agent for agent in agents if agent.kind == "lead"]
    with_subagents = {agent.session for agent in agents if agent.kind == "subagent"}
    assert shape.sessions == len({agent.session for agent in leads}) == 6
    assert shape.calls == sum(len(agent.turns) for agent in agents)
    assert shape.subagent_share == pytest.approx(len(with_subagents) / 6, abs=0.001)
    assert shape.ideal_read_share == pytest.approx(ideal_of(agents, calls).cached_ratio, abs=1e-4)


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.trace", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_the_command_writes_a_seeds_trace_and_its_shape(tmp_path: Path) -> None:
    options = ("--shape", "published_kind", "--sessions", "3", "--scale", "0.05", "--seed")
    one, same, other = (command(*options, seed) for seed in ("1", "1", "2"))
    assert (one.stdout, one.stderr) == (same.stdout, same.stderr)
    assert one.stdout != other.stdout
    shape = json.loads(one.stderr)
    assert shape["sessions"] == 3
    assert shape["calls"] == len(one.stdout.splitlines())
    path = tmp_path / "trace.jsonl"
    path.write_text(one.stdout)
    fewer = command("--trace", str(path), "--sessions", "2")
    assert json.loads(fewer.stderr)["sessions"] == 2
    path.write_text('{"timestamp": 1}\n')
    wrong = command("--trace", str(path))
    assert wrong.returncode == 1
    assert f"{path}:1: input_length" in wrong.stderr


_GOOD: dict[str, Any] = {
    "timestamp": 5,
    "input_length": 1000,
    "output_length": 3,
    "hash_ids": [4, 5],
}
_NO_COUNTS = st.one_of(
    *(st.none(), st.booleans(), st.text(), st.floats(), st.integers(max_value=-1)),
    st.lists(st.integers(), max_size=3),
)
_NO_TIMES = st.one_of(
    *(st.none(), st.booleans(), st.text(), st.just(math.inf), st.just(math.nan)),
    st.just(10**400),
)
_NO_BLOCKS = st.one_of(
    *(st.none(), st.integers(), st.text(), st.lists(st.text(), min_size=2, max_size=2)),
    st.lists(st.integers()).filter(lambda blocks: len(blocks) != 2),
    st.lists(st.one_of(st.floats(), st.booleans(), st.none()), min_size=2, max_size=2),
)


@given(
    st.one_of(
        st.tuples(st.just("timestamp"), _NO_TIMES),
        st.tuples(st.sampled_from(["input_length", "output_length"]), _NO_COUNTS),
        st.tuples(st.just("hash_ids"), _NO_BLOCKS),
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_bad_field_is_named_with_its_file_and_line(
    tmp_path_factory: pytest.TempPathFactory,
    bad: tuple[str, object],
    before: int,
    is_missing: bool,
) -> None:
    field, value = bad
    line = {name: good for name, good in _GOOD.items() if name != field}
    if not is_missing:
        line[field] = value
    path = tmp_path_factory.getbasetemp() / "bad.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*[_GOOD] * before, line]))
    with pytest.raises(ValueError, match=r"bad\.jsonl:") as raised:
        list(read_records(path))
    assert f"{path}:{before + 1}: {field}: " in str(raised.value)


@given(st.binary(max_size=40).filter(lambda line: line.strip() and b"\n" not in line))
def test_any_bytes_are_a_record_or_an_error_with_file_and_line(
    tmp_path_factory: pytest.TempPathFactory, line: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(json.dumps(_GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"bytes\.jsonl:2: "):
        list(read_records(path))


def parsed(*words: str) -> TraceConfig | None:
    parser = ArgumentParser()
    add_trace_options(parser)
    return trace_of(parser, parser.parse_args(words), TraceConfig(sessions=7, pace=3))


def test_options_change_what_they_name_and_leave_the_rest() -> None:
    assert parsed() is None
    found = parsed("--shape", "published_kind", "--seed", "4", "--scale", "0.5")
    assert found == TraceConfig("published_kind", sessions=7, pace=3, seed=4, scale=0.5)
    assert parsed("--trace", "file") == TraceConfig(MOONCAKE, sessions=7, pace=3, file="file")


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "1"),
        ("--shape", "none"),
        ("--shape", "team", "--trace", "file"),
        ("--shape", "team", "--sessions", "0"),
        ("--shape", "team", "--scale", "nan"),
    ],
)
def test_options_that_make_no_trace_end_the_program(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
