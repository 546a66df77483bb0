"""Benches that take a trace send what it says."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from bench.agents.conversations import Conversation
from bench.lib.fleet import routing_of
from bench.lib.index_side import HEAD_SEGMENTS, OWN_SEGMENTS, Ours, residents
from bench.lib.misroute.load import Load
from bench.lib.pin_load import Texts
from bench.sim.__main__ import measure
from bench.store import compare
from bench.trace.agents import TraceConfig
from bench.trace.calls import compile_calls
from bench.trace.mooncake import lines_of
from bench.trace.recording import records_of
from bench.trace.variants import MOONCAKE, make_trace

SMALL = TraceConfig("published_kind", sessions=3, scale=0.002)


def test_the_simulator_serves_every_call_of_a_trace_file(tmp_path: Path) -> None:
    agents = make_trace(SMALL)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines_of(records_of(agents, compile_calls(agents)))))
    found = measure(TraceConfig(MOONCAKE, file=str(path)), workers=2)
    calls = sum(len(agent.turns) for agent in agents)
    for policy in ("ours", "round_robin", "least_loaded", "sticky"):
        assert found[policy]["requests"] == calls


def test_sessions_have_the_conversations_of_a_trace_and_begin_it_again() -> None:
    agents = make_trace(SMALL)
    load = Load("http://none", "model", sessions=2, think_s=1, seed=1, trace=agents)
    assert load.traced is not None
    talks = list(islice(load.traced, len(agents) + 1))
    assert [talk.system for talk in talks] == [a.opening() for a in (*agents, agents[0])]
    for talk, agent in zip(talks, agents, strict=False):
        assert [ask.text for ask in talk.asks] == [turn.text() for turn in agent.turns]
        assert [ask.pause_s for ask in talk.asks] == [turn.gap_s for turn in agent.turns]


def test_a_conversation_has_the_texts_and_lengths_of_an_agent() -> None:
    agent = make_trace(SMALL)[0]
    talk = Conversation(1, 3, "model", Texts(), agent)
    assert talk.turns == 3
    body = talk.turn(2, []).body
    asked = [each["content"] for each in body["messages"] if each["role"] == "user"]
    assert asked == [turn.text() for turn in agent.turns[:3]]
    assert body["messages"][0]["content"].endswith(agent.opening())
    assert body["max_tokens"] == agent.turns[2].answer_tokens


@pytest.mark.parametrize("workers", [1, 8])
def test_a_fleets_router_places_turns_where_their_conversation_is(workers: int) -> None:
    side = Ours(workers, 2_000)
    held: dict[int, tuple[int, list[int]]] = {}
    for worker, chain in residents(2_000, workers):
        side.apply(worker, side.event(chain))
        if len(chain) == HEAD_SEGMENTS + OWN_SEGMENTS:
            held.setdefault(chain[-1], (worker, chain))
    for worker, chain in held.values():
        attempt = side.router.place(routing_of([*chain, 7], HEAD_SEGMENTS, 1024), set())
        assert attempt is not None
        assert attempt.worker.slot == worker
        side.router.attempts.fail(attempt, by_worker=False)


def test_the_store_keeps_each_turn_of_a_trace() -> None:
    agents = make_trace(SMALL)[:1]
    (figures,) = compare("smallest", (), agents)["stores"].values()
    assert set(figures) == {"store_turn", "load_conversation"}
