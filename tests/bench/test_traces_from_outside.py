"""Traces of the published shape, and in Mooncake's format."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.sim.prompts import BLOCK_TOKENS
from bench.trace.agents import Agent, TraceConfig
from bench.trace.calls import Call, Conversation, compile_calls, ideal_of
from bench.trace.published import MEDIAN_CALLS, MEDIAN_OUTPUT, SUBAGENT_SHARE
from bench.trace.variants import make_trace

SCALE = 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "ideal"), [("published_kind", 0.968), ("published_unkind", 0.858)]
)
def test_a_trace_has_the_published_shape(variant: str, ideal: float) -> None:
    agents = make_trace(TraceConfig(variant, sessions=150, scale=SCALE))
    calls = compile_calls(agents)
    made = [call for of_agent in calls for call in of_agent]
    sessions: dict[str, list[Agent]] = {}
    for agent in agents:
        sessions.setdefault(agent.session, []).append(agent)
    own_calls = [
        sum(len(agent.turns) for agent in each if agent.kind == "lead")
        for each in sessions.values()
    ]
    with_subagents = [any(a.kind == "subagent" for a in each) for each in sessions.values()]
    prompt = statistics.median(call.prompt_tokens for call in made) / SCALE
    output = statistics.median(call.output_tokens for call in made) / SCALE
    assert statistics.median(own_calls) == pytest.approx(MEDIAN_CALLS, rel=0.1)
    assert prompt == pytest.approx(142_000, rel=0.08)
    assert output == pytest.approx(MEDIAN_OUTPUT, rel=0.05)
    assert statistics.mean(with_subagents) == pytest.approx(SUBAGENT_SHARE, abs=0.06)
    assert ideal_of(agents, calls).cached_ratio == pytest.approx(ideal, abs=0.008)


def written(folder: Path, *lines: dict[str, Any]) -> TraceConfig:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return TraceConfig("mooncake", sessions=100, file=str(path))


def line(at_ms: int, blocks: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    lengths = {"input_length": tokens, "output_length": 7, "hash_ids": blocks}
    return {"timestamp": at_ms, **lengths, **more}


def only_calls(agents: tuple[Agent, ...]) -> list[Call]:
    return [call for (call,) in compile_calls(agents)]


def test_prompts_share_the_blocks_that_a_trace_names(tmp_path: Path) -> None:
    config = written(tmp_path, line(5000, [1, 2, 3], 1500), line(6000, [1, 2, 9], 1536))
    agents = make_trace(config)
    first, second = only_calls(agents)
    shared = sum(a == b for a, b in zip(first.keys, second.keys, strict=False))
    assert 1024 - BLOCK_TOKENS <= shared * BLOCK_TOKENS <= 1024
    assert [agent.starts_at for agent in agents] == [0.0, 1.0]
    texts = [
        len(Conversation(agent).ask(agent.turns[0])["messages"][0]["content"]) for agent in agents
    ]
    assert texts == [1500 * 4, 1536 * 4]
    assert ideal_of(agents, compile_calls(agents)).cached_tokens == shared * BLOCK_TOKENS


def test_the_requests_of_a_chat_are_one_session(tmp_path: Path) -> None:
    lines = [
        line(0, [1], 500, chat_id=10, parent_chat_id=-1),
        line(1, [2], 500, chat_id=11, parent_chat_id=-1),
        line(2, [1, 3], 600, chat_id=12, parent_chat_id=10),
        line(3, [1, 3], 700, chat_id=13, parent_chat_id=12),
    ]
    first, other, second, third = make_trace(written(tmp_path, *lines))
    assert first.session == second.session == third.session != other.session


def test_a_trace_is_cut_to_so_many_sessions_and_scaled(tmp_path: Path) -> None:
    config = written(tmp_path, *(line(1000 * n, [n, n + 1], 1000) for n in range(5)))
    agents = make_trace(replace(config, sessions=3, scale=0.5, pace=2))
    assert [agent.starts_at for agent in agents] == [0.0, 0.5, 1.0]
    assert [(a.turns[0].tokens, len(a.turns[0].blocks)) for a in agents] == [(500, 2)] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"timestamp": 1},
        line(1, [1], 1500),
        line(1, [], 0),
        line(1, ["x"], 5),  # type: ignore[list-item]
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    config = written(tmp_path, line(0, [1], 500), wrong)
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: "):
        make_trace(config)


def test_a_trace_needs_its_file() -> None:
    with pytest.raises(ValueError, match="file: "):
        make_trace(TraceConfig("mooncake"))
