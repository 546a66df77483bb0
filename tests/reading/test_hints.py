"""Hints: those of a client, and the defaults of an operator where the client gives none."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import Marks, TtlLimits, read_marks
from sgl_ext.reading.hints import (
    LIMIT,
    Importance,
    honoured_hints,
    limits_with,
    read_importance,
)
from sgl_ext.wire.headers import (
    DEFAULTS_HEADER,
    NO_DEFAULTS,
    DefaultHints,
    defaults_line,
    read_defaults,
)

# Default hints: they act like the client's own, where the client gives none.

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


# Priority and related hints are read from headers and bodies, and limited by the ceiling.

OURS, DYNAMO = "x-sgl-ext-priority", "x-dynamo-request-priority"


def hinted(**hints: Any) -> dict[str, Any]:
    return {"nvext": {"agent_hints": hints}}


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ({}, {}, 0),
        ({}, None, 0),
        ({OURS: "7"}, {}, 7),
        ({OURS: " -7 "}, {}, -7),
        ({DYNAMO: "5"}, {}, 5),
        ({OURS: "7", DYNAMO: "5"}, {}, 7),
        ({}, hinted(priority=3), 3),
        ({OURS: "7"}, hinted(priority=3), 7),
        ({}, {"service_tier": "priority"}, 10),
        ({}, {"service_tier": "flex"}, -10),
        ({}, {"service_tier": "auto"}, 0),
        ({}, {"service_tier": "flex"} | hinted(priority=0), 0),
        ({}, hinted(priority=2**63), LIMIT),
        ({OURS: "-99999999"}, {}, -LIMIT),
    ],
)
def test_the_sources_of_priority_have_an_order(
    headers: dict[str, str], body: Any, priority: int
) -> None:
    found = read_importance(headers, body)
    assert (found.priority, found.error, found.ignored) == (priority, "", 0)


@pytest.mark.parametrize(
    ("headers", "body", "ceiling", "priority", "is_clamped"),
    [
        ({OURS: "900"}, {}, 5, 5, True),
        ({OURS: "-900"}, {}, 5, -900, False),
        ({OURS: "5"}, {}, 5, 5, False),
        ({}, hinted(priority=6), 5, 5, True),
        ({}, {"priority": 6}, 5, 5, True),
        ({}, {"service_tier": "priority"}, 5, 5, True),
        ({OURS: "6"}, hinted(priority=7), 5, 5, True),
        ({OURS: "4"}, hinted(priority=7), 5, 4, False),
        ({OURS: "6"}, hinted(priority=4), 5, 5, True),
        ({DYNAMO: str(2**63)}, {"priority": 2**63}, LIMIT, LIMIT, True),
        ({}, {}, -5, -5, False),
        ({}, {"service_tier": "auto"}, -5, -5, False),
        ({}, hinted(osl=3), -5, -5, False),
        ({OURS: "0"}, {}, -5, -5, True),
        ({OURS: "-6"}, {}, -5, -6, False),
        ({OURS: "-9999"}, {}, -LIMIT, -LIMIT, False),
    ],
)
def test_priority_is_clamped_to_the_ceiling_and_the_clamp_is_reported(
    headers: dict[str, str], body: Any, ceiling: int, priority: int, is_clamped: bool
) -> None:
    found = read_importance(headers, body, ceiling)
    assert (found.priority, found.is_clamped, found.error) == (priority, is_clamped, "")


def test_an_expected_output_length_is_read() -> None:
    assert read_importance({}, hinted(osl=300)) == Importance(0, 300)


@pytest.mark.parametrize("value", [True, False, None])
def test_the_hint_to_prefill_ahead_is_read(value: bool | None) -> None:
    hints = hinted(speculative_prefill=value, priority=3)
    assert read_importance({}, hints) == Importance(3, speculative_prefill=value)
    assert read_importance({OURS: "5"}, hints).speculative_prefill is value
    assert read_importance({}, {}).speculative_prefill is None


@pytest.mark.parametrize("value", ["true", 1, 0, 1.0, [], {}])
def test_prefilling_ahead_is_true_or_false(value: Any) -> None:
    error = read_importance({}, hinted(speculative_prefill=value)).error
    wanted = "nvext.agent_hints.speculative_prefill: must be true or false, not "
    assert error == wanted + repr(value)


@pytest.mark.parametrize("value", ["high", "5", 1.5, float("nan"), True, [], {}])
def test_a_wrong_type_in_our_own_field_is_an_error_that_names_it(value: Any) -> None:
    assert "nvext.agent_hints.priority" in read_importance({}, hinted(priority=value)).error
    assert "nvext.agent_hints.osl" in read_importance({}, hinted(osl=value)).error


@pytest.mark.parametrize("value", ["5", 1.5, 5.0, float("nan"), True, [], {}, -(2.0**64)])
def test_a_wrong_type_in_sglangs_field_is_ignored_and_counted(value: Any) -> None:
    assert read_importance({}, {"priority": value}) == Importance(ignored=1)
    assert read_importance({OURS: "3"}, {"priority": value}) == Importance(3, ignored=1)
    assert read_importance({}, {"priority": value} | hinted(priority=4)) == Importance(4, ignored=1)


def test_a_whole_number_of_any_size_is_a_priority_in_sglangs_field_too() -> None:
    assert read_importance({}, {"priority": 2**63}).priority == LIMIT
    assert read_importance({}, {"priority": -(2**63)}).priority == -LIMIT
    assert read_importance({}, {"priority": None}) == Importance()


@pytest.mark.parametrize("value", ["high", "5", 1.5, float("nan"), True])
def test_a_valid_source_does_not_excuse_a_malformed_one(value: Any) -> None:
    header = {OURS: "high" if value == "5" else str(value)}
    assert OURS in read_importance(header, hinted(priority=5)).error
    assert OURS in read_importance(header, {"priority": 5}).error
    for headers in ({OURS: "5"}, header):
        assert (
            "nvext.agent_hints.priority" in read_importance(headers, hinted(priority=value)).error
        )


def test_other_malformed_fields_of_our_own_are_named() -> None:
    assert "nvext.agent_hints" in read_importance({}, {"nvext": {"agent_hints": 5}}).error
    for value in ("x", 5, [], True):
        error = read_importance({}, {"nvext": value}).error
        assert error == f"nvext: must be an object, not {value!r}"
    assert "osl" in read_importance({}, hinted(osl=-1)).error
    for text in ("high", "1.5", "nan", "1" * 30):
        assert OURS in read_importance({OURS: text}, {}).error


def test_unknown_values_of_other_vendors_hints_are_counted() -> None:
    assert read_importance({DYNAMO: "high"}, {}) == Importance(ignored=1)
    assert read_importance({}, {"service_tier": "gold"}) == Importance(ignored=1)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["nvext", "service_tier"]), _JSON), _JSON, _JSON)
def test_no_body_breaks_it(body: dict[str, Any], hints: Any, priority: Any) -> None:
    for document in (body, hinted(priority=priority), {"nvext": {"agent_hints": hints}}, hints):
        found = read_importance({}, document)
        assert -LIMIT <= found.priority <= LIMIT
        orjson.dumps(found.error)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 262_000),
        ({"max_tokens": 4}, 4),
        ({"max_tokens": 4.0}, 4),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_output_tokens": 6}, 6),
        ({"sampling_params": {"max_new_tokens": 7}}, 7),
        ({"max_tokens": 300_000}, 262_000),
        ({"max_tokens": None, "sampling_params": [{"max_new_tokens": 1}]}, 262_000),
    ],
)
def test_an_answer_is_not_expected_to_be_longer_than_the_request_allows(
    body: dict[str, Any], expected: int
) -> None:
    assert read_importance({}, body | hinted(osl=262_000)).output_tokens == expected


def test_the_higher_of_both_priorities_of_agent_hints_counts() -> None:
    assert read_importance({}, hinted(strict_priority=7)).priority == 7
    assert read_importance({}, hinted(strict_priority=7, priority=9)).priority == 9
    assert read_importance({}, hinted(strict_priority=7), ceiling=3) == Importance(
        3, is_clamped=True
    )


def test_a_deadline_is_in_milliseconds_and_within_a_day() -> None:
    assert read_importance({}, hinted(due=1500)).due_s == 1.5
    assert read_importance({}, hinted(due=0)).due_s == 0
    assert read_importance({}, hinted(due=2**70)).due_s == 86_400
    assert read_importance({}, hinted()).due_s is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("due", "5"), ("due", 1.5), ("due", True), ("due", -1), ("strict_priority", "1")],
)
def test_a_malformed_deadline_or_tier_is_named(field: str, value: object) -> None:
    error = read_importance({}, hinted(**{field: value})).error
    assert error.startswith(f"nvext.agent_hints.{field}: must ")


@pytest.mark.parametrize(
    ("headers", "body", "names"),
    [
        ({}, {}, ()),
        ({"x-session-id": "s"}, {"prompt_cache_key": "k"}, ()),
        ({}, [], ()),
        ({}, {"service_tier": "flex"}, ("service_tier",)),
        ({}, {"service_tier": "auto", "priority": "5"}, ()),
        ({"x-sgl-ext-priority": "5"}, {"priority": 3}, ("x-sgl-ext-priority",)),
        ({"x-dynamo-request-priority": "high"}, {"priority": 3}, ("priority",)),
        (
            {},
            hinted(priority=1, strict_priority=2, due=9, osl=4),
            tuple(f"nvext.agent_hints.{name}" for name in ("strict_priority", "due", "osl")),
        ),
        ({}, hinted(due=-1), ()),
        ({"x-agent-hint": "e30", "x-dynamo-request-priority": "3"}, {}, ("x-agent-hint",)),
        ({}, {"nvext": {"cache_control": {"type": "ephemeral"}}}, ("nvext.cache_control",)),
        ({}, {"kv_hints": {"actions": []}}, ("kv_hints",)),
    ],
)
def test_an_answer_names_the_hints_that_count(
    headers: dict[str, str], body: Any, names: tuple[str, ...]
) -> None:
    assert honoured_hints(headers, body, 100) == names
