"""One table of workers from several sources."""

from __future__ import annotations

from sgl_ext.membership.member import Member
from sgl_ext.membership.merging import AdminChanges, merge

ONE, TWO = Member(id="1", url="http://a:1"), Member(id="2", url="http://b:1")


def test_of_two_sources_that_name_a_worker_the_first_counts() -> None:
    same_id, same_url = Member(id="1", url="http://c:1"), Member(id="3", url="http://b:1")
    listed, conflicts = merge({"x": [ONE], "y": [same_id, TWO], "z": [same_url]}, AdminChanges())
    assert [(member, source) for member, source in listed] == [(ONE, "x"), (TWO, "y")]
    assert [str(conflict) for conflict in conflicts] == [
        "y names 1 at http://c:1, as x does, which counts",
        "z names 3 at http://b:1, as y does, which counts",
    ]


def test_an_engine_and_its_successor_share_a_url() -> None:
    leaving = Member(id="0", url=ONE.url, state="draining")
    listed, conflicts = merge({"x": [leaving, ONE]}, AdminChanges())
    assert ([member for member, _ in listed], conflicts) == ([leaving, ONE], [])


def test_the_admin_api_adds_workers_and_removes_those_of_others() -> None:
    changes = AdminChanges(1.0, added=("http://c:1",), removed=("1",))
    listed, _ = merge({"x": [ONE, TWO]}, changes)
    assert [(member.id, source) for member, source in listed] == [
        ("2", "x"),
        ("http://c:1", "admin"),
    ]
