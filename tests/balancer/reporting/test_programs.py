"""Programs of the state document."""

from __future__ import annotations

from typing import Any

from sgl_ext.balancer.reporting.activity import programs_of


def session(name: str | None, **more: Any) -> dict[str, Any]:
    usual = {"tenant": "alice", "engine": "one", "turns": 2, "prompt_tokens": 1000}
    usual |= {"cached_share": 0.5, "last_s": 10.0, "harness": "claude-code", "class": "main"}
    return {**usual, "agent": None, "harness_session": name, **more}


def test_the_agents_of_a_harness_s_session_are_one_program() -> None:
    lead = session("s", turns=5, prompt_tokens=3000, cached_share=1.0, last_s=30.0)
    helper = session("s", engine="two", **{"class": "subagent"})
    workflow = session("s", cached_share=None, **{"class": "workflow"})
    (found,) = programs_of([lead, helper, workflow])
    assert found == {
        "session": "s",
        "tenant": "alice",
        "harness": "claude-code",
        "agents": 3,
        "subagents": 2,
        "turns": 9,
        "prompt_tokens": 5000,
        "cached_share": 0.875,
        "engines": 2,
        "last_s": 30.0,
    }


def test_what_a_harness_sends_beside_its_agents_is_no_agent() -> None:
    (found,) = programs_of([session("s"), session("s", **{"class": "auxiliary"})])
    assert (found["agents"], found["turns"]) == (1, 4)
    (found,) = programs_of([session("s", **{"class": "side_reply"})])
    assert found["agents"] == 1


def test_the_latest_is_first_and_one_name_of_two_tenants_is_two_programs() -> None:
    found = programs_of(
        [
            session("s"),
            session("s", tenant="bob", last_s=20.0),
            session(None),
            session("t", last_s=15.0),
        ]
    )
    assert [(one["tenant"], one["session"]) for one in found] == [
        ("bob", "s"),
        ("alice", "t"),
        ("alice", "s"),
    ]


def test_a_single_session_of_an_unknown_client_is_no_program() -> None:
    single, first, second = (session(name, harness="unknown") for name in "abb")
    assert [one["session"] for one in programs_of([single, first, second])] == ["b"]


def test_without_a_usage_the_share_is_unknown() -> None:
    assert programs_of([session("s", cached_share=None)])[0]["cached_share"] is None
