"""One table of workers from several sources."""

from __future__ import annotations

from sgl_ext.membership.member import Member, merge
from sgl_ext.wire.peers import AdminChanges

NOTHING = AdminChanges()
ONE, TWO = Member(id="1", url="http://a:1"), Member(id="2", url="http://b:1")


def table(
    admin: AdminChanges = NOTHING, model: str = "", **lists: list[Member]
) -> tuple[list[tuple[str, str]], str, list[str]]:
    """The merged table, with the ids and sources of its workers."""
    listed, model, ignored = merge(lists, admin, model)
    return [(member.id, source) for member, source in listed], model, ignored


def test_of_two_sources_that_name_a_worker_the_first_counts() -> None:
    same_id, same_url = Member(id="1", url="http://c:1"), Member(id="3", url="http://b:1")
    listed, _, ignored = table(x=[ONE], y=[same_id, TWO], z=[same_url])
    assert listed == [("1", "x"), ("2", "y")]
    assert ignored == [
        "y names 1 at http://c:1, as x does, which counts",
        "z names 3 at http://b:1, as y does, which counts",
    ]


def test_an_engine_and_its_successor_share_a_url() -> None:
    leaving = Member(id="0", url=ONE.url, state="draining")
    assert table(x=[leaving, ONE]) == ([("0", "x"), ("1", "x")], "", [])


def test_the_admin_api_adds_workers_and_removes_those_of_others() -> None:
    changes = AdminChanges(1.0, added=("http://c:1",), removed=("1",))
    listed, _, _ = table(changes, x=[ONE, TWO])
    assert listed == [("2", "x"), ("http://c:1", "admin")]


def test_workers_of_another_model_wait_until_none_states_the_one_that_is_served() -> None:
    old = Member(id="old", url="http://c:1", model="a")
    new = Member(id="new", url="http://d:1", model="b")
    listed, model, ignored = table(x=[ONE, old, new])
    assert (listed, model) == ([("1", "x"), ("old", "x")], "a")
    assert ignored == ["x names new at http://d:1 with the model b; the others serve a"]
    assert table(model="a", x=[new, old, ONE])[:2] == ([("old", "x"), ("1", "x")], "a")
    leaving = Member(id="old", url="http://c:1", model="a", state="draining")
    assert table(model="a", x=[leaving, new, ONE])[:2] == ([("new", "x"), ("1", "x")], "b")
    assert table(model="b", x=[]) == ([], "b", [])
