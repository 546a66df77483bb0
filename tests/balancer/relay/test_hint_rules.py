"""Which default hints a request gets, by its tenant, agent, harness and model."""

from __future__ import annotations

import pickle
from typing import Any

from sgl_ext.balancer.relay.reading import HintRules
from sgl_ext.settings.schema import DefaultHint
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints
from tests.balancer.conftest import Engine, Start

RULES = HintRules(
    [
        DefaultHint("model", "m", priority=1, osl=1, ttl_s=1, prefill=True),
        DefaultHint("harness", "codex", priority=2, osl=2, ttl_s=2),
        DefaultHint("tenant", "people", priority=3, osl=3),
        DefaultHint("harness", "claude-code", osl=7),
    ]
)
CODEX = {b"user-agent": b"codex_exec/1"}


def given(tenant: str, headers: dict[bytes, bytes], body: Any, **stripped: str) -> DefaultHints:
    return RULES.of(tenant, headers).of(body, stripped)


def test_the_tenant_wins_over_the_harness_and_that_over_the_model() -> None:
    body = {"model": "m"}
    assert given("people", CODEX, body) == DefaultHints(3, 3, True, 2)
    assert given("", CODEX, body) == DefaultHints(2, 2, True, 2)
    assert given("people", {}, body) == DefaultHints(3, 3, True, 1)
    assert given("other", {}, body) == DefaultHints(1, 1, True, 1)
    assert given("people", {}, {}) == DefaultHints(3, 3)


def test_what_no_table_names_has_no_defaults() -> None:
    for body in ({}, None, [], {"model": "x"}, {"model": 3}, {"model": None}):
        assert given("other", {}, body) is NO_DEFAULTS


def test_a_stripped_header_line_tells_the_harness() -> None:
    assert given("", {}, {}, cc_version="2.1").osl == 7
    assert given("", CODEX, {}, cc_version="2.1").osl == 2  # its own header says more


AGENTS = HintRules(
    [
        DefaultHint("tenant", "people", osl=1),
        DefaultHint("agent", "Explore", osl=2, ttl_s=60),
        DefaultHint("agent", "subagent", osl=3, ttl_s=5, priority=-5),
        DefaultHint("harness", "claude-code", osl=4, prefill=False, ttl_s=9),
    ]
)
EXPLORER = {
    b"user-agent": b"claude-cli/2.1.330",
    b"x-claude-code-agent-id": b"a1",
    b"x-claude-code-agent-type": b"Explore",
}


def test_the_type_of_an_agent_wins_over_its_class_and_that_over_the_harness() -> None:
    explorer = AGENTS.of("", EXPLORER)
    assert explorer.of({}, {}) == DefaultHints(-5, 2, False, 60)
    assert explorer.explain({}, {})["priority"] == {"value": -5, "from": "agent subagent"}
    assert AGENTS.of("people", EXPLORER).of({}, {}) == DefaultHints(-5, 1, False, 60)
    other = {**EXPLORER, b"x-claude-code-agent-type": b"Plan"}
    assert AGENTS.of("", other).of({}, {}) == DefaultHints(-5, 3, False, 5)
    lead = {b"user-agent": b"claude-cli/2.1.330"}
    assert AGENTS.of("", lead).of({}, {}) == DefaultHints(None, 4, False, 9)


def test_a_stripped_header_line_tells_a_sub_agent() -> None:
    lead = AGENTS.of("", {b"user-agent": b"claude-cli/2.1.330"})
    assert lead.of({}, {"cc_is_subagent": "true"}).priority == -5
    main = {b"user-agent": b"claude-cli/2.1.330", b"x-claude-code-request-class": b"main"}
    assert AGENTS.of("", main).of({}, {"cc_is_subagent": "true"}).priority is None


def test_codex_names_its_sub_agents_in_its_turn() -> None:
    turn = b'{"thread_source": "subagent", "thread_id": "t", "subagent_kind": "Explore"}'
    assert AGENTS.of("", {b"x-codex-turn-metadata": turn}).of({}, {}).osl == 2


def test_a_process_for_large_bodies_decides_alike() -> None:
    found = RULES.of("people", CODEX)
    copy = pickle.loads(pickle.dumps(found))
    assert copy.of({"model": "m"}, {}) == found.of({"model": "m"}, {})


def test_explain_names_the_table_of_each_default() -> None:
    assert RULES.of("people", CODEX).explain({"model": "m"}, {}) == {
        "priority": {"value": 3, "from": "tenant people"},
        "osl": {"value": 3, "from": "tenant people"},
        "prefill": {"value": True, "from": "model m"},
        "ttl_s": {"value": 2, "from": "harness codex"},
    }


def test_without_a_table_there_are_no_rules() -> None:
    assert RULES
    assert not HintRules()


async def test_an_answer_says_which_hints_count(start: Start) -> None:
    client = await start(Engine("a"))
    body = {"messages": [{"role": "user", "content": "Hello"}], "service_tier": "flex"}
    hints = {"due": 900, "osl": 20}
    for more, names in (
        ({}, "service_tier"),
        (
            {"nvext": {"agent_hints": hints}},
            "service_tier, nvext.agent_hints.due, nvext.agent_hints.osl",
        ),
        ({"service_tier": "auto"}, None),
    ):
        async with client.post("/v1/messages", json=body | more) as answer:
            assert answer.status == 200
            assert answer.headers.get("x-sgl-ext-hints") == names


async def test_a_malformed_foreign_hint_is_counted_and_its_request_answered(start: Start) -> None:
    client = await start(Engine("a"))
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    headers = {"x-agent-hint": "!"}
    async with client.post("/v1/messages", json=body, headers=headers) as answer:
        assert answer.status == 200
        assert "x-sgl-ext-hints" not in answer.headers
    metrics = await (await client.get("/metrics")).text()
    assert 'sgl_ext_client_hints_ignored_total{hint="x-agent-hint"} 1.0' in metrics


async def test_a_side_query_gets_the_priority_of_the_operator_s_table(start: Start) -> None:
    rules = (DefaultHint("agent", "side_query", priority=-5),)
    engine = Engine("a")
    client = await start(engine, hints=rules)
    headers = {
        "user-agent": "claude-cli/2.1.332",
        "anthropic-beta": "claude-code-side-query-2026-09-29",
    }
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    async with client.post("/v1/messages", json=body, headers=headers) as answer:
        assert answer.status == 200
    assert engine.seen[-1][2]["x-sgl-ext-default-hints"] == '{"priority":-5}'
