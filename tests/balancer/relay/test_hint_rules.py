"""Which default hints a request gets, by its tenant, harness and model."""

from __future__ import annotations

import pickle
from typing import Any

from sgl_ext.balancer.relay.hint_rules import HintRules
from sgl_ext.requests.default_hints import NO_DEFAULTS, DefaultHints
from sgl_ext.settings.schema import DefaultHint

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
    return RULES.asked(tenant, headers).of(body, stripped)


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


def test_a_process_for_large_bodies_decides_alike() -> None:
    asked = RULES.asked("people", CODEX)
    copy = pickle.loads(pickle.dumps(asked))
    assert copy.of({"model": "m"}, {}) == asked.of({"model": "m"}, {})


def test_explain_names_the_table_of_each_default() -> None:
    assert RULES.asked("people", CODEX).explain({"model": "m"}, {}) == {
        "priority": {"value": 3, "from": "tenant people"},
        "osl": {"value": 3, "from": "tenant people"},
        "prefill": {"value": True, "from": "model m"},
        "ttl_s": {"value": 2, "from": "harness codex"},
    }


def test_without_a_table_there_are_no_rules() -> None:
    assert RULES
    assert not HintRules()
