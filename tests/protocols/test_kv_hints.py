"""Actions in `kv_hints` are read, and those of other components are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.prompt_cache import LIMIT_ACTIONS, NO_HINTS, OTHER, KvHints, read_kv_hints


def action(kind: Any, version: Any = "0.1", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def read(*actions: Any) -> KvHints:
    return read_kv_hints({"kv_hints": {"protocol_version": "0.1", "actions": list(actions)}})


@pytest.mark.parametrize("kind", ["pin", "Pin", "kv.pin", "kv_hint.pin.v1", "Retain", "kv.retain"])
def test_a_lease_has_the_stated_ttl_or_the_servers_default(kind: str) -> None:
    assert read(action(kind, ttl="10m")).lease_s == 600
    assert read(action(kind)).lease_s is None
    assert read(action(kind, ttl=30), action(kind, ttl="1h"), action(kind)).lease_s == 3600


def test_actions_without_a_lease() -> None:
    assert read(action("kv.prefetch")) == KvHints(prefetches=True, counts=Counter(prefetch=1))
    assert read({"action_type": "Demote"}) == KvHints(demotes=True, counts=Counter(demote=1))
    for body in (None, [], {}, {"kv_hints": None}, {"kv_hints": {}}):
        assert read_kv_hints(body) is NO_HINTS


@pytest.mark.parametrize("other", [action("kv.fetch", keys=[1]), action("kv.pin", "2.0")])
def test_what_does_not_work_here_is_counted(other: dict[str, Any]) -> None:
    assert read(other, action("demote")) == KvHints(
        demotes=True, counts=Counter({OTHER: 1, "demote": 1})
    )


def test_a_batch_has_no_pins_so_its_actions_are_counted() -> None:
    envelope = {"actions": [action("kv.pin")]}
    assert read_kv_hints({"kv_hints": [envelope, None]}) == KvHints(counts=Counter({OTHER: 1}))


@pytest.mark.parametrize(
    ("hints", "error"),
    [
        ("pin", "kv_hints: must be an object with a list of `actions`"),
        ([[]], "kv_hints: must be an object with a list of `actions`"),
        ({"actions": {}}, "kv_hints: must be an object with a list of `actions`"),
        ({"actions": ["pin"]}, "kv_hints.actions.0.action_type: must be a text"),
        ({"actions": [{"action_type": 1}]}, "kv_hints.actions.0.action_type: must be a text"),
        ({"actions": [{"action_type": "pin", "payload": 1}]}, "kv_hints.actions.0.payload: must"),
        ({"actions": [action("pin", ttl="soon")]}, "kv_hints.actions.0.payload.ttl: must be"),
        (
            {"actions": [action("pin"), action("kv.retain", directives=[])]},
            "kv_hints.actions.1.payload.directives: is not supported by 'retain'",
        ),
        ({"actions": [action("demote", ttl=1)]}, "kv_hints.actions.0.payload.ttl: is not"),
        ({"actions": [action("pin")] * (LIMIT_ACTIONS + 1)}, "kv_hints.actions: must not be more"),
    ],
)
def test_a_malformed_hint_is_rejected_by_name(hints: Any, error: str) -> None:
    found = read_kv_hints({"kv_hints": hints})
    assert found == KvHints(error=found.error)
    assert found.error.startswith(error)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["kv.pin", "1h"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["actions", "action_type", "action_version", "payload", "ttl"]), inner
        )
    ),
    max_leaves=20,
)
actions = st.fixed_dictionaries(
    {"action_type": st.sampled_from(["pin", "retain", "prefetch", "demote", "x"]) | anything},
    optional={"payload": st.fixed_dictionaries({"ttl": anything}) | anything},
)


@given(anything | st.fixed_dictionaries({"actions": st.lists(actions, max_size=4) | anything}))
def test_each_action_works_is_counted_or_is_refused(hints: Any) -> None:
    found = read_kv_hints({"kv_hints": hints})
    if found.error:
        assert found.error.startswith("kv_hints")
        return
    counts = found.counts
    told = hints if isinstance(hints, dict) else {}
    if isinstance(told.get("actions"), list):
        assert counts.total() == len(told["actions"])
    assert found.prefetches == (counts["prefetch"] > 0)
    assert found.demotes == (counts["demote"] > 0)
    assert (found.lease_s != 0) == (counts["pin"] + counts["retain"] > 0)
