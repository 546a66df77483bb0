"""How important a request is, as its client says; and what no client may say."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.requests.priority import LIMIT, Importance, read_importance

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
def test_who_says_it_and_who_wins(headers: dict[str, str], body: Any, priority: int) -> None:
    found = read_importance(headers, body)
    assert (found.priority, found.error, found.ignored) == (priority, "", 0)


def test_nobody_is_above_the_ceiling() -> None:
    assert read_importance({OURS: "900"}, {}, ceiling=5).priority == 5
    assert read_importance({OURS: "-900"}, {}, ceiling=5).priority == -900


def test_an_expected_output_is_read_beside_it() -> None:
    assert read_importance({}, hinted(osl=300)) == Importance(0, 300)


@pytest.mark.parametrize("value", ["high", "5", 1.5, float("nan"), True, [], {}])
def test_another_type_in_our_own_field_is_named(value: Any) -> None:
    assert "nvext.agent_hints.priority" in read_importance({}, hinted(priority=value)).error
    assert "nvext.agent_hints.osl" in read_importance({}, hinted(osl=value)).error


def test_what_else_is_malformed_in_our_own_names_is_named() -> None:
    assert "nvext.agent_hints" in read_importance({}, {"nvext": {"agent_hints": 5}}).error
    assert "osl" in read_importance({}, hinted(osl=-1)).error
    for text in ("high", "1.5", "nan", "1" * 30):
        assert OURS in read_importance({OURS: text}, {}).error


def test_hints_of_other_vocabularies_that_say_nothing_are_counted() -> None:
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
