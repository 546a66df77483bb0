"""Sessions and tenants of the answered requests, of one process and of several."""

from __future__ import annotations

import json
from typing import Any

from sgl_ext.balancer.reporting import activity
from sgl_ext.balancer.reporting.activity import Activity, merged
from sgl_ext.reading.client import ClientFacts
from sgl_ext.reading.usage import Usage

NOW_S = 1_000_000.0


def add(to: Activity, now_s: float = NOW_S, **about: Any) -> None:
    usual = {"tenant": "", "session": 1, "engine": "e0", "prompt_tokens": 10, "ttft_s": 0.1}
    to.add(now_s, **{**usual, "usage": None, **about})


def shown(*processes: Activity, now_s: float = NOW_S) -> dict[str, Any]:
    """As another process reads it."""
    return merged([json.loads(json.dumps(each.as_json(now_s))) for each in processes], now_s)


def test_a_session_s_share_is_of_all_its_turns() -> None:
    one = Activity(NOW_S)
    facts = ClientFacts("claude-code", request_class="subagent", agent_type="Explore")
    facts = facts._replace(session="8d1f")
    add(one, session=0xAB, tenant="alice", usage=Usage(100, 0, 120))
    add(
        one,
        NOW_S + 5,
        session=0xAB,
        tenant="alice",
        engine="e1",
        usage=Usage(300, 100, 250),
        facts=facts,
    )
    assert shown(one, now_s=NOW_S + 6)["sessions"] == [
        {
            "id": f"{0xAB:032x}",
            "tenant": "alice",
            "engine": "e1",
            "turns": 2,
            "prompt_tokens": 300,
            "cached_share": 0.25,
            "ttft_s": 0.1,
            "errors": 0,
            "last_s": NOW_S + 5,
            "harness": "claude-code",
            "class": "subagent",
            "agent": "Explore",
            "harness_session": "8d1f",
        }
    ]


def test_agents_that_state_no_id_are_one_session() -> None:
    one, two = Activity(NOW_S), Activity(NOW_S)
    add(one, session=1, name="s", tenant="bob", usage=Usage(100, 100, 1))
    add(two, NOW_S + 1, session=2, name="s", tenant="bob", usage=Usage(300, 100, 201))
    add(two, NOW_S + 2, session=3, name="s", tenant="alice")
    found = shown(one, two, now_s=NOW_S + 2)
    assert [(row["id"], row["tenant"], row["turns"]) for row in found["sessions"]] == [
        ("s", "alice", 1),
        ("s", "bob", 2),
    ]
    assert found["sessions"][1]["cached_share"] == 0.5
    assert (found["session_count"], len(found["agents"])) == (2, 3)


def test_output_tokens_are_what_was_computed_beyond_the_prompt() -> None:
    one = Activity(NOW_S)
    add(one, usage=Usage(100, 40, 80))
    assert shown(one, now_s=NOW_S + 10)["history"]["output_tokens_per_s"] == [2.0]


def test_what_reports_no_usage_has_no_share() -> None:
    one = Activity(NOW_S)
    add(one, prompt_tokens=70)
    found = shown(one)
    assert (found["sessions"][0]["cached_share"], found["sessions"][0]["prompt_tokens"]) == (
        None,
        70,
    )
    assert found["tenants"] == [
        {"name": "", "requests": 1, "prompt_tokens": 0, "cached_share": None}
    ]


def test_the_most_recent_sessions_stay() -> None:
    one = Activity(NOW_S)
    for number in range(activity.MOST_SESSIONS + 10):
        add(one, NOW_S + number / 1000, session=number)
        add(one, NOW_S + number / 1000 + 0.0001, session=0)
    found = shown(one)
    assert activity.MOST_SESSIONS // 2 < found["session_count"] <= activity.MOST_SESSIONS
    assert len(found["sessions"]) == activity.SHOWN_SESSIONS
    assert found["sessions"][0]["id"] == f"{0:032x}"
    assert found["sessions"][1]["id"] == f"{activity.MOST_SESSIONS + 9:032x}"
    later = shown(one, now_s=NOW_S + activity.SESSION_S + 10)
    assert (later["session_count"], later["sessions"]) == (0, [])


def test_tenants_beyond_the_bound_are_one() -> None:
    one = Activity(NOW_S)
    for number in range(activity.MOST_TENANTS + 5):
        add(one, tenant=f"t{number}", session=None, usage=Usage(10, 5, 6))
    rows = shown(one)["tenants"]
    assert len(rows) <= activity.MOST_TENANTS + 1
    assert {
        "name": activity.OTHERS,
        "requests": 5,
        "prompt_tokens": 50,
        "cached_share": 0.5,
    } in rows
    assert sum(row["requests"] for row in rows) == activity.MOST_TENANTS + 5


def test_processes_add_up() -> None:
    one, two = Activity(NOW_S), Activity(NOW_S)
    add(one, session=7, tenant="bob", usage=Usage(100, 100, 1))
    add(two, NOW_S + 1, session=7, tenant="bob", engine="e1", usage=Usage(300, 100, 201))
    add(two, session=8, tenant="bob")
    found = shown(one, two, now_s=NOW_S + 2)
    assert found["session_count"] == 2
    row = found["sessions"][0]
    assert (row["turns"], row["engine"], row["prompt_tokens"]) == (2, "e1", 300)
    assert row["cached_share"] == 0.5
    assert found["tenants"][0]["requests"] == 3
