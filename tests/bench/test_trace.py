"""The trace: the same for a seed, closed, and as cacheable as it says."""

import orjson
import pytest

from bench.sim.engine import Engine, EngineConfig, Request
from bench.sim.policies import RoundRobin
from bench.sim.prompts import BLOCK_TOKENS, BYTES_PER_TOKEN, answer_to, prompt_blocks
from bench.sim.virtual_time import Answer, Run
from bench.trace.agents import Agent, TraceConfig
from bench.trace.calls import CHAT, Call, Conversation, Loop, compile_calls, ideal_of
from bench.trace.swarm import make_swarm
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain


def small(seed: int = 1) -> tuple[Agent, ...]:
    return make_swarm(TraceConfig(sessions=10, calls=8, scale=0.1, ramp_s=2, seed=seed))


def test_a_seed_decides_everything() -> None:
    assert small() == small()
    assert small() != small(seed=2)


def test_every_call_comes_once_and_after_what_it_waits_for() -> None:
    agents = small()
    loop, seen, over = Loop(agents), set[tuple[int, int]](), set[int]()
    while loop.open:
        now = loop.next_at()
        for agent, turn in loop.due(now):
            assert (agent, turn) not in seen
            assert turn == 0 or (agent, turn - 1) in seen
            assert over.issuperset(agents[agent].turns[turn].waits_for)
            seen.add((agent, turn))
            if turn + 1 == len(agents[agent].turns):
                over.add(agent)
            loop.finished(agent, turn, now + 1)
    assert seen == {(agent.number, turn) for agent in agents for turn in range(len(agent.turns))}


def test_a_team_can_be_cached_as_well_as_published() -> None:
    agents = make_swarm(TraceConfig(sessions=20))
    ideal = ideal_of(agents, compile_calls(agents))
    # 99% of the ideal has to be at least the published 97.2%.
    assert 0.99 * ideal.cached_ratio >= 0.972
    assert ideal.read_write >= 11.7
    mains = [agent for agent in agents if agent.kind in ("lead", "mate")]
    assert min(len(agent.turns) for agent in mains) >= 42


def test_the_ideal_is_that_of_one_engine_without_bounds() -> None:
    agents = small()
    calls = compile_calls(agents)
    ideal = ideal_of(agents, calls)
    config = EngineConfig(capacity_tokens=1 << 40, prefill_tokens_per_s=1e12, prefill_base_s=0)
    engine, loop, cached = Engine(config), Loop(agents), 0
    while loop.open:
        now = loop.next_at()
        for agent, turn in loop.due(now):
            call = calls[agent][turn]
            request = Request(call.keys, call.prompt_tokens, 1, call.chain)
            engine.submit(request, now)
            engine.advance(now + 1e-9)
            cached += request.cached_tokens
            loop.finished(agent, turn, now)
    # Only the answers are missing in this engine.
    assert 0 <= ideal.cached_tokens - cached <= ideal.output_tokens + BLOCK_TOKENS * ideal.requests


def test_the_ideal_of_some_calls_counts_these_only() -> None:
    agents = small()
    calls = compile_calls(agents)
    first = {(agent.number, 0) for agent in agents}
    some = ideal_of(agents, calls, only=first)
    assert some.requests == len(agents)
    assert 0 < some.cached_ratio < ideal_of(agents, calls).cached_ratio


def first_calls(agents: tuple[Agent, ...], kind: str) -> list[Call]:
    calls = compile_calls(agents)
    return [calls[agent.number][0] for agent in agents if agent.kind == kind]


def shared_tokens(one: Call, other: Call) -> int:
    equal = [a == b for a, b in zip(one.keys, other.keys, strict=False)]
    return equal.index(False) * BLOCK_TOKENS


def test_who_shares_how_much() -> None:
    team = make_swarm(TraceConfig(sessions=10))
    lead, other_lead = first_calls(team, "lead")
    mates = first_calls(team, "mate")
    assert shared_tokens(lead, mates[0]) == pytest.approx(32_000, rel=0.05)
    assert shared_tokens(lead, other_lead) == 0
    explorers = first_calls(team, "explore")
    assert shared_tokens(*explorers[:2]) == pytest.approx(16_000, rel=0.05)
    assert shared_tokens(lead, explorers[0]) == 0


def test_compiled_calls_are_those_an_engine_reads_from_the_bodies() -> None:
    agent = small()[0]
    talk = Conversation(agent)
    for call, turn in zip(compile_calls([agent])[0], agent.turns, strict=True):
        body = orjson.loads(orjson.dumps(talk.ask(turn)))
        blocks = prompt_blocks(body)
        assert list(call.keys[: len(blocks.keys)]) == list(blocks.keys)
        assert call.prompt_tokens == blocks.tokens
        assert call.chain == read_chain(of_path(CHAT), body)
        talk.hear(answer_to(body["messages"][-1]["content"], turn.answer_tokens))


def test_a_segments_end_is_a_position_in_the_simulated_prompt() -> None:
    body = Conversation(small()[0]).ask(small()[0].turns[0])
    end = read_chain(of_path(CHAT), body).ends[-1]
    opening = len(b"\xffmassistant\xffb")
    assert end == prompt_blocks(body).size - opening
    assert BYTES_PER_TOKEN * BLOCK_TOKENS * len(prompt_blocks(body).keys) <= end + opening


def simulated(workers: int) -> list[Answer]:
    agents = small()
    run = Run(agents, compile_calls(agents), RoundRobin(), [Engine() for _ in range(workers)])
    run.all()
    return run.answers


def test_a_simulation_serves_all_and_repeats_itself() -> None:
    calls = compile_calls(small())
    prompt = sum(call.prompt_tokens for of_agent in calls for call in of_agent)
    answers = simulated(2)
    assert [each[1:] for each in answers] == [each[1:] for each in simulated(2)]
    assert len(answers) == sum(map(len, calls))
    one, four = (sum(each.cached_tokens for each in simulated(n)) / prompt for n in (1, 4))
    assert one > four
    assert one > 0.97 * ideal_of(small(), calls).cached_ratio
