"""Recorded sessions: what is read of a file, how they are played again, and what is counted."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.recorded.__main__ import agents_at
from bench.recorded.arms import ARMS
from bench.recorded.one_engine import engine_of, play
from bench.recorded.real_engines import Step, steps
from bench.recorded.replay import compile_calls, replay
from bench.recorded.routers import behind
from bench.recorded.sessions import (
    Conversation,
    Session,
    Turn,
    find_file,
    made_sessions,
    read_sessions,
    runs_of,
)
from bench.sim.engine import Engine, EngineConfig, Request
from bench.sim.policies import StickyUntilSaturated

BLOCK = 64


def turn(blocks: list[int], answer_tokens: int = 10, think_s: float = 1.0) -> Turn:
    return Turn(len(blocks) * BLOCK + 5, answer_tokens, tuple(runs_of(blocks)), think_s)


def request(**fields: Any) -> dict[str, Any]:
    return {"t": 0.0, "type": "n", "in": 130, "out": 7, "runs": [[1, 2]], **fields}


def line(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    session = {"block_size": 64, "models": ["m"], "tool_tokens": 64, "system_tokens": 64}
    return {**session, **fields, "requests": list(requests)}


def read(folder: Path, *lines: dict[str, Any]) -> list[Session]:
    path = folder / "sessions.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)
    return read_sessions(path)


def test_a_session_is_read_with_its_gaps_and_its_sub_agents(tmp_path: Path) -> None:
    inner = line(request(**{"in": 70, "runs": [[9, 1]]}), type="subagent", t=3.0)
    (session,) = read(
        tmp_path,
        line(request(api_time=2.0), inner, request(t=9.0, think_time=4.0), request(t=30.0)),
    )
    own, other = session.conversations
    assert [one.think_s for one in own.turns] == [0.0, 4.0, 21.0]
    assert [one.starts for one in own.turns] == [(), (1,), ()]
    assert (own.head_tokens, own.turns[0].prompt_tokens, own.turns[0].answer_tokens) == (
        128,
        130,
        7,
    )
    assert other.turns[0].runs == ((9, 1),)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"in": 64}, "runs"),
        ({"in": "many"}, "ValueError"),
        ({"think_time": -1.0}, "think_time"),
        ({"runs": [[1]]}, "ValueError"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=rf":2: .*{named}"):
        read(tmp_path, line(request()), line(request(**fields)))


def test_a_given_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--sessions"):
        find_file(tmp_path / "none")


def test_made_sessions_are_equal_for_equal_seeds_and_grow_as_recorded_ones() -> None:
    one, other = made_sessions(20, seed=3), made_sessions(20, seed=3)
    assert one == other != made_sessions(20, seed=4)
    shared = total = 0
    for session in one:
        turns = session.conversations[0].turns
        for before, after in itertools.pairwise(turns):
            total += after.prompt_tokens
            shared += min(before.prompt_tokens, after.prompt_tokens)
    assert shared / total > 0.9


def test_a_prompt_shares_keys_with_the_one_before_as_far_as_its_blocks_are_equal() -> None:
    turns = (turn([1, 2, 3]), turn([1, 2, 3, 4]), turn([1, 2, 8, 4]))
    calls = compile_calls(Conversation("v", 0, turns), 0, "s", is_subagent=False, grain=1)
    first, second, third = (list(call.keys) for call in calls)
    assert second[:3] == first[:3]
    assert third[:2] == second[:2]
    # After another block the same numbers are other blocks.
    assert not set(third[2:]) & set(second)


def test_the_answer_is_cached_where_the_next_prompt_goes_on_with_it() -> None:
    turns = (turn([1, 2], answer_tokens=2 * BLOCK), turn([1, 2, 3, 4]))
    calls = compile_calls(Conversation("v", 0, turns), 0, "s", is_subagent=False, grain=1)
    assert list(calls[0].keys[:4]) == list(calls[1].keys[:4])


def test_conversations_of_one_version_share_their_head_alone() -> None:
    one, other, foreign = (
        compile_calls(
            Conversation(version, 2 * BLOCK, (turn([1, 2, 3]),)),
            agent,
            "s",
            is_subagent=False,
            grain=1,
        )[0]
        for agent, version in ((0, "v"), (1, "v"), (2, "w"))
    )
    assert list(one.keys[:2]) == list(other.keys[:2])
    assert one.keys[2] != other.keys[2]
    assert one.chain.hashes[0] == other.chain.hashes[0] != foreign.chain.hashes[0]
    assert one.chain.head_segments == 1


def test_people_work_through_session_after_session() -> None:
    session = Session(1, (Conversation("v", 0, (turn([1]), turn([1, 2]))),))
    played = replay([session], 2, grain=1, limit_s=30.0)
    begun = [agent for agent in played.agents if agent.starts_at is not None]
    assert len(begun) == 2
    assert all(agent.turns[-1].starts for agent in begun)
    with pytest.raises(ValueError, match="short enough"):
        replay([session], 1, longest_tokens=10)


def requests_of(names: str, blocks: int = 4) -> list[Request]:
    """Prompts that share nothing."""
    return [
        Request([ord(name) * 1000 + place for place in range(blocks + 1)], blocks * BLOCK + 1, 1)
        for name in names
    ]


def answered(engine: Engine, request: Request, at_s: float) -> int:
    engine.submit(request, at_s)
    engine.advance(at_s + 1.0)
    return request.cached_tokens


def test_a_pinned_prompt_outlives_prompts_that_are_not_pinned() -> None:
    config = EngineConfig(capacity_tokens=12 * BLOCK, pin_ttl_s=300.0, pin_share=0.5)
    engine = Engine(config)
    pinned, again = requests_of("aa")
    assert answered(engine, pinned, 0.0) == 0
    engine.config = EngineConfig(capacity_tokens=12 * BLOCK)  # the others ask for no pin
    for number, other in enumerate(requests_of("bcdefg")):
        answered(engine, other, 10.0 + number)
    assert answered(engine, again, 100.0) == 4 * BLOCK
    engine.cache.check()


def test_pins_give_way_to_a_request_that_would_not_fit_otherwise() -> None:
    engine = Engine(EngineConfig(capacity_tokens=12 * BLOCK, pin_ttl_s=300.0, pin_share=1.0))
    for number, one in enumerate(requests_of("ab")):
        answered(engine, one, float(number))
    (large,) = requests_of("c", blocks=9)
    answered(engine, large, 10.0)
    assert engine.finished == 3
    engine.cache.check()


def test_pins_stay_if_a_request_does_not_fit_without_them_either() -> None:
    engine = Engine(EngineConfig(capacity_tokens=12 * BLOCK, pin_ttl_s=300.0, pin_share=1.0))
    pinned, running = requests_of("aa")
    answered(engine, pinned, 0.0)
    # It goes on from the pinned prompt, and holds it: without its pin nothing would be free.
    running.output_tokens = 3 * BLOCK
    running.keys = [*running.keys, *range(3)]
    engine.submit(running, 10.0)
    engine.advance(10.1)
    (waiting,) = requests_of("c", blocks=7)
    engine.submit(waiting, 10.2)
    assert engine.load.queued == 1
    assert [pin.tokens for pin in engine.pins] == [4]
    engine.advance(1000.0)
    assert engine.finished == 3
    engine.cache.check()


def test_the_host_has_what_the_device_has_lost() -> None:
    engine = Engine(EngineConfig(capacity_tokens=12 * BLOCK, host_tokens=64 * BLOCK))
    first, again = requests_of("aa")
    answered(engine, first, 0.0)
    for number, other in enumerate(requests_of("bcdefg")):
        answered(engine, other, 10.0 + number)
    assert engine.cached_tokens(again) == 0
    assert answered(engine, again, 100.0) == 4 * BLOCK


def test_a_session_that_is_closed_leaves_what_others_use() -> None:
    engine = Engine(EngineConfig(capacity_tokens=100 * BLOCK))
    one = Request([1, 2, 3, 4, 5], 4 * BLOCK + 1, 1)
    other = Request([1, 2, 8, 9, 10], 4 * BLOCK + 1, 1)
    answered(engine, one, 0.0)
    answered(engine, other, 10.0)
    engine.close(one.keys)
    assert engine.cached_tokens(Request([1, 2, 3, 4, 5], 4 * BLOCK + 1, 1)) == 2 * BLOCK
    assert engine.cached_tokens(Request([1, 2, 8, 9, 10], 4 * BLOCK + 1, 1)) == 4 * BLOCK


@pytest.mark.parametrize("name", list(ARMS))
def test_each_arm_answers_all_turns(name: str) -> None:
    played = play(ARMS[name], made_sessions(40), 16, grain=32, span_s=1500.0)
    figures = played.figures()
    assert figures["turns"] > 0
    assert 0 < figures["cached_share"] < 1


def test_an_agent_moves_when_its_engine_is_saturated() -> None:
    policy, engines = StickyUntilSaturated(), [Engine(engine_of(1)) for _ in range(3)]
    calls = [
        compile_calls(Conversation("v", 0, (turn([1]),)), n, "s", is_subagent=False, grain=1)[0]
        for n in range(12)
    ]
    home = policy(calls[0], engines, 0.0)
    assert policy(calls[0], engines, 1.0) == home
    for call in calls[1:]:
        policy.begin(call, home, 2.0)
    assert policy(calls[0], engines, 3.0) != home


def test_agents_at_a_level_lie_on_a_line_between_two_numbers() -> None:
    table = {"20": {"within": 1.0}, "30": {"within": 0.97}, "40": {"within": 0.93}}
    assert agents_at(table) == 35.0
    assert agents_at({"20": {"within": 0.99}}) == 20.0
    assert agents_at({"20": {"within": 0.5}}) == 2.0


def test_an_arm_ahead_of_ours_is_named_with_its_figure() -> None:
    ours = {"ttft_p50_s": 1.0, "ttft_p90_s": 2.0, "ttft_p99_s": 3.0, "cached_share": 0.8}
    faster = {**ours, "ttft_p90_s": 1.5, "cached_share": 0.81}
    assert behind({"ours": ours, "other": faster}, 0.03) == ["other ttft_p90_s"]
    assert behind({"ours": ours, "other": ours}) == []


def test_messages_share_what_blocks_share() -> None:
    first = turn([1, 2, 3, 4])
    longer, rewritten = turn([1, 2, 3, 4, 5, 6], think_s=50.0), turn([1, 2, 3, 9, 10])
    conversation = Conversation("v1", 2 * BLOCK, (first, longer, rewritten))
    one, two, three = steps(conversation, "a", 8)
    other = steps(conversation, "b", 8)[0]

    def texts(step: Step) -> list[str]:
        return [message["content"][0]["text"] for message in step.body["messages"]]

    # The head is that of its version, whoever uses it.
    assert one.body["system"][0] == other.body["system"][0]
    assert texts(one) != texts(other)
    assert texts(two)[:-1] == texts(one)
    # A turn that goes on from the middle of a message has none of that message.
    assert len(texts(three)) == 1
    assert texts(three) != texts(one)
    assert (one.gap_s, two.gap_s) == (0.0, 0.5)
    marked = [m["content"][0].get("cache_control") for m in two.body["messages"]]
    assert marked == [None, {"type": "ephemeral"}]
