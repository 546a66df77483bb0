"""One table of workers from several sources."""

from __future__ import annotations

from sgl_ext.membership.member import Member, merge
from sgl_ext.wire.peers import AdminChanges

NOTHING = AdminChanges()
ONE, TWO = Member(id="1", url="http://a:1"), Member(id="2", url="http://b:1")


def table(
    admin: AdminChanges = NOTHING, **lists: list[Member]
) -> tuple[list[tuple[str, str]], list[str]]:
    """The merged table, with the ids and sources of its workers."""
    listed, ignored = merge(lists, admin)
    return [(member.id, source) for member, source in listed], ignored


def test_of_two_sources_that_name_a_worker_the_first_counts() -> None:
    same_id, same_url = Member(id="1", url="http://c:1"), Member(id="3", url="http://b:1")
    listed, ignored = table(x=[ONE], y=[same_id, TWO], z=[same_url])
    assert listed == [("1", "x"), ("2", "y")]
    assert ignored == [
        "y names 1 at http://c:1, as x does, which counts",
        "z names 3 at http://b:1, as y does, which counts",
    ]


def test_an_engine_and_its_successor_share_a_url() -> None:
    leaving = Member(id="0", url=ONE.url, state="draining")
    assert table(x=[leaving, ONE]) == ([("0", "x"), ("1", "x")], [])


def test_the_admin_api_adds_workers_and_removes_those_of_others() -> None:
    changes = AdminChanges(1.0, added=("http://c:1",), removed=("1",))
    listed, _ = table(changes, x=[ONE, TWO])
    assert listed == [("1", "x"), ("2", "x"), ("http://c:1", "admin")]


def test_what_the_admin_api_drained_stays_drained_when_it_is_started_again() -> None:
    changes = AdminChanges(1.0, added=("http://c:1",), removed=("engine-1@box", "http://c:1"))
    again = Member(id="engine-1.2@box", url="http://a:1", name="engine-1@box")
    listed, _ = merge({"x": [again, TWO]}, changes)
    assert [member.state for member, _ in listed] == ["drained", "ready", "drained"]
    ended = Member(id="engine-1@box", url="http://a:1", state="ended")
    assert merge({"x": [ended]}, changes).listed[0].member.state == "ended"
