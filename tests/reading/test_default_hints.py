"""Default hints: they act like the client's own, where the client gives none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import Marks, TtlLimits, read_marks
from sgl_ext.reading.hints import LIMIT, limits_with, read_importance
from sgl_ext.wire.headers import (
    DEFAULTS_HEADER,
    NO_DEFAULTS,
    DefaultHints,
    defaults_line,
    read_defaults,
)

LIMITS = TtlLimits(1.0, 3600.0, default_s=300.0)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


priorities = st.integers(-LIMIT, LIMIT)
hints = st.builds(
    DefaultHints,
    maybe(priorities),
    maybe(st.integers(0, 5000)),
    maybe(st.booleans()),
    maybe(st.just(0.0) | st.floats(1, 1e6)),
)


def client_hints(stated: DefaultHints) -> dict[str, Any]:
    """A body in which a client states the same."""
    named = {
        "priority": stated.priority,
        "osl": stated.osl,
        "speculative_prefill": stated.prefill,
    }
    given_ones = {name: value for name, value in named.items() if value is not None}
    return {"nvext": {"agent_hints": given_ones}}


@given(hints, priorities, maybe(st.integers(1, 3000)))
def test_a_default_acts_like_the_clients_own_hint(
    stated: DefaultHints, ceiling: int, max_tokens: int | None
) -> None:
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    by_default = read_importance({}, limit, ceiling, stated)
    by_client = read_importance({}, limit | client_hints(stated), ceiling)
    assert by_default.priority == by_client.priority <= max(ceiling, -LIMIT)
    assert by_default.output_tokens == by_client.output_tokens
    assert by_default.speculative_prefill == by_client.speculative_prefill
    assert not by_default.is_clamped  # the client asked for nothing


@given(hints, hints, priorities)
def test_what_a_request_states_wins_one_by_one(
    stated: DefaultHints, defaults: DefaultHints, ceiling: int
) -> None:
    found = read_importance({}, client_hints(stated), ceiling, defaults)
    whole = stated.over(defaults)
    expected = read_importance({}, client_hints(whole), ceiling)
    assert (found.priority, found.output_tokens, found.speculative_prefill) == (
        expected.priority,
        expected.output_tokens,
        expected.speculative_prefill,
    )


@given(hints, hints, hints)
def test_merging_is_associative_and_nothing_is_neutral(
    one: DefaultHints, two: DefaultHints, three: DefaultHints
) -> None:
    assert one.over(two).over(three) == one.over(two.over(three))
    assert one.over(NO_DEFAULTS) == NO_DEFAULTS.over(one) == one


@given(hints)
def test_an_engine_reads_what_its_balancer_wrote(stated: DefaultHints) -> None:
    name, _, value = defaults_line(stated).decode().rstrip("\r\n").partition(": ")
    assert name == DEFAULTS_HEADER
    assert read_defaults({name: value}) == stated


def test_a_malformed_header_is_an_error() -> None:
    for value in ("", "{", '{"osl": "x"}'):
        with pytest.raises(ValueError, match=r"."):
            read_defaults({DEFAULTS_HEADER: value})


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-sgl-ext-priority": "2"}, {}),
        ({"x-dynamo-request-priority": "2"}, {}),
        ({}, {"priority": 2}),
        ({}, {"nvext": {"agent_hints": {"priority": 2}}}),
    ],
)
def test_every_way_to_state_a_priority_wins(headers: dict[str, str], body: Any) -> None:
    assert read_importance(headers, body, defaults=DefaultHints(priority=9)).priority == 2


def test_a_tier_that_says_nothing_leaves_the_default() -> None:
    defaults = DefaultHints(priority=9)
    assert read_importance({}, {"service_tier": "auto"}, defaults=defaults).priority == 9
    assert read_importance({}, {"service_tier": "flex"}, defaults=defaults).priority == -10


MARK = {"type": "ephemeral"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def marks(path: str, defaults: DefaultHints, **body: Any) -> Marks:
    return read_marks(of_path(path), body, limits_with(defaults, LIMITS))


def test_a_ttl_pins_prompts_without_marks_as_a_client_would() -> None:
    stated = {"nvext": {"cache_control": MARK | {"ttl": 900}}}
    assert marks(CHAT, DefaultHints(ttl_s=900)) == marks(CHAT, NO_DEFAULTS, **stated)
    assert marks(CHAT, DefaultHints(ttl_s=9e6)).whole_ttl_s == 3600


def test_a_ttl_is_that_of_marks_that_state_none() -> None:
    system = [{"type": "text", "text": "a", "cache_control": MARK}]
    (mark,) = marks(MESSAGES, DefaultHints(ttl_s=900), system=system).blocks
    assert mark.ttl_s == 900
    system[0]["cache_control"] = MARK | {"ttl": "1h"}
    (mark,) = marks(MESSAGES, DefaultHints(ttl_s=900), system=system).blocks
    assert mark.ttl_s == 3600


def test_a_client_that_wants_nothing_kept_keeps_nothing() -> None:
    found = marks(CHAT, DefaultHints(ttl_s=900), nvext={"cache_control": {"type": "none"}})
    assert (found.keep, found.whole_ttl_s) == (False, 0.0)


def test_a_ttl_of_0_is_no_pin_and_leaves_marks_alone() -> None:
    limits = TtlLimits(1.0, 3600.0, default_s=300.0, unmarked_s=60.0)
    changed = limits_with(DefaultHints(ttl_s=0), limits)
    assert (changed.unmarked_s, changed.default_s) == (0.0, 300.0)
    assert limits_with(NO_DEFAULTS, limits) is limits
