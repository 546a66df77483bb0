"""The table of workers: the lists of sources, applied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import generate_latest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing import workers as table_of_workers
from sgl_ext.balancer.routing.router import explain
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.member import Member
from sgl_ext.wire.peers import AdminChanges
from tests.balancer.routing.test_router import Setting

ONE, TWO = Member(id="1", url="http://a:1"), Member(id="2", url="http://b:1")


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_slots_are_used_again(setting: Setting) -> None:
    gone = setting.workers.all[0]
    setting.workers.apply(gone.source, [w.member for w in setting.workers.all if w is not gone])
    joined = setting.workers.add("http://c", 2.0)
    assert joined is not None
    assert joined.slot == gone.slot
    assert setting.workers.add("http://c", 3.0) is joined


def table(**lists: list[Member]) -> Workers:
    workers = Workers(Metrics(), lambda: 100.0)
    for source, members in lists.items():
        workers.apply(source, members)
    for worker in workers.all:
        workers.mark(worker, ready=True)
    return workers


def named(workers: Workers, name: str) -> Worker:
    found = workers.find(name)
    assert found is not None
    return found


def changed(member: Member, **values: Any) -> Member:
    return Member(**{"id": member.id, "url": member.url, "labels": member.labels} | values)


def test_a_worker_that_is_gone_gets_nothing_new_and_leaves_after_its_last_request() -> None:
    workers = table(x=[ONE, TWO])
    one = named(workers, "1")
    one.in_flight = 1
    workers.apply("x", [TWO])
    assert [worker.id for worker in workers.ready] == ["2"]
    assert not one.is_available
    workers.remove_drained()
    assert one in workers.all
    one.in_flight = 0
    workers.remove_drained()
    assert one not in workers.all
    assert workers.find("1") is None


def test_a_worker_without_requests_leaves_at_once() -> None:
    workers = table(x=[ONE, TWO])
    left: list[str] = []
    workers.on_leave.append(lambda worker: left.append(worker.id))
    workers.apply("x", [])
    assert (workers.all, left) == ([], ["1", "2"])


def test_a_worker_that_is_back_before_its_last_request_ended_is_taken_back() -> None:
    workers = table(x=[ONE])
    one = named(workers, "1")
    one.in_flight = 1
    workers.apply("x", [])
    workers.apply("x", [ONE])
    assert workers.ready == [one]
    one.in_flight = 0
    workers.remove_drained()
    assert workers.all == [one]


def test_a_draining_worker_stays_in_the_table_without_new_requests() -> None:
    workers = table(x=[ONE])
    one = named(workers, "1")
    workers.apply("x", [changed(ONE, state="draining")])
    workers.remove_drained()
    assert (workers.all, workers.ready, one.is_available) == ([one], [], False)
    workers.apply("x", [ONE])
    assert one.is_available


def test_nothing_is_remembered_of_an_engine_that_another_replaces_at_its_url() -> None:
    setting = Setting()
    first = setting.place(setting.read("Task"))
    setting.confirm(first)
    setting.router.attempts.succeed(first)
    old = first.worker
    members = [Member(id=f"{worker.id} again", url=worker.url) for worker in setting.workers.all]
    setting.workers.apply("workers", members)
    for worker in setting.workers.all:
        setting.workers.mark(worker, ready=True)
    assert old not in setting.workers.all
    found = explain(setting.router, setting.read("Task", "Done.", "Go on"))
    assert found["home"] is None
    assert [row["held_tokens"] for row in found["workers"]] == [0, 0]
    assert {row["name"] for row in found["workers"]} == {member.id for member in members}


def test_an_old_engine_keeps_its_requests_while_its_successor_takes_new_ones() -> None:
    workers = table(x=[ONE])
    old = named(workers, "1")
    old.in_flight = 1
    workers.apply("x", [changed(ONE, state="draining"), Member(id="3", url=ONE.url)])
    new = named(workers, "3")
    workers.mark(new, ready=True)
    assert (workers.ready, workers.all) == ([new], [old, new])
    assert workers.find_url(ONE.url) is new
    workers.apply("x", [Member(id="3", url=ONE.url)])
    old.in_flight = 0
    workers.remove_drained()
    assert workers.all == [new]


def test_a_worker_that_moved_is_a_new_one() -> None:
    workers = table(x=[ONE])
    old = named(workers, "1")
    old.in_flight = 1
    workers.apply("x", [changed(ONE, url="http://c:1")])
    assert named(workers, "1") is not old
    assert {worker.url for worker in workers.all} == {"http://a:1", "http://c:1"}
    page = generate_latest(workers).decode()
    assert page.count('sgl_ext_worker_ready{worker="1"}') == 1


def test_only_what_joins_after_a_sources_first_list_has_a_cold_cache() -> None:
    workers = table(x=[ONE])
    workers.apply("y", [TWO])
    workers.apply("y", [TWO, Member(id="3", url="http://c:1")])
    assert {worker.id: worker.warmth(100.0) for worker in workers.all} == {"1": 1, "2": 1, "3": 0}


def test_two_sources_that_name_one_worker_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = table(x=[ONE], y=[changed(TWO, url=ONE.url)])
    workers.apply("x", [ONE])
    assert caplog.messages == ["y names 2 at http://a:1, as x does, which counts"]
    workers.apply("x", [])
    assert [(worker.id, worker.source) for worker in workers.all] == [("2", "y")]


def test_the_operators_first_source_counts_whichever_is_read_first() -> None:
    workers = Workers(Metrics(), sources=["x", "y"])
    workers.apply("y", [changed(ONE, id="y")])
    workers.apply("x", [ONE])
    assert [worker.id for worker in workers.all] == ["1"]


def test_what_the_admin_api_drains_stays_drained_until_it_is_taken_back() -> None:
    workers = table(x=[ONE, TWO])
    workers.remove(named(workers, "1"), 1.0)
    workers.apply("x", [TWO, ONE])
    assert [worker.id for worker in workers.ready] == ["2"]
    assert named(workers, "1").state == "drained"
    assert workers.readiness() == (1, 2)
    assert workers.add(ONE.url, 2.0) is named(workers, "1")
    assert workers.readiness() == (2, 2)
    workers.add("http://c:1", 3.0)
    workers.remove(named(workers, "http://c:1"), 4.0)
    assert [worker.id for worker in workers.ready] == ["1", "2"]
    assert workers.add("http://c:1", 5.0) is named(workers, "http://c:1")


def test_a_worker_is_drained_once_its_requests_have_ended() -> None:
    workers = table(x=[ONE, TWO])
    one = named(workers, "1")
    one.in_flight = 1
    workers.remove(one, 1.0)
    assert one.state == "draining"
    one.in_flight = 0
    assert one.state == "drained"


def test_an_added_worker_that_was_drained_is_forgotten_once_it_is_silent() -> None:
    workers = table(x=[ONE])
    added = workers.add("http://c:1", 1.0)
    assert added is not None
    added.is_reachable = True
    workers.remove(added, 2.0)
    workers.forget_silent(3.0)
    assert added in workers.all
    added.is_reachable = False
    workers.forget_silent(4.0)
    assert [worker.id for worker in workers.all] == ["1"]
    assert (workers.admin.added, workers.admin.removed) == ((), ())


def test_engines_that_ended_are_missed_and_those_that_leave_are_not() -> None:
    ended, leaving = changed(ONE, state="ended"), changed(TWO, state="draining")
    third = Member(id="3", url="http://d:1")
    workers = table(x=[ended, leaving, third])
    assert named(workers, "1").state == "ended"
    assert workers.readiness() == (1, 2)


def test_what_other_balancers_removed_is_remembered_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_of_workers, "MOST_ELSEWHERE", 2)
    workers = table(x=[ONE, TWO])
    workers.change(AdminChanges(1.0, removed=("a", "1", "b", "c")))
    workers.remove(named(workers, "2"), 2.0)
    assert workers.admin.removed == ("1", "b", "c", "2")


def test_an_edit_counts_after_a_step_back_of_the_clock() -> None:
    workers = table(x=[ONE])
    workers.remove(named(workers, "1"), 100.0)
    assert workers.add(ONE.url, 50.0) is named(workers, "1")


def test_the_metrics_of_a_worker_end_with_it() -> None:
    metrics = Metrics()
    workers = Workers(metrics)
    workers.apply("x", [ONE, TWO])
    for worker in workers.all:
        metrics.prefix_events.counts[(worker.id,)] += 1
        metrics.prefix_event_faults.counts[worker.id, "gap"] += 1
        metrics.prediction_error_tokens.observe(worker.id, 1.0)
    workers.apply("x", [TWO])
    page = metrics.render().decode()
    assert 'worker="2"' in page
    assert 'worker="1"' not in page


class Lists(RuleBasedStateMachine):
    """Any sequence of lists of two sources, with requests that begin and end."""

    sources = st.sampled_from(["x", "y"])
    members = st.lists(
        st.builds(
            Member,
            id=st.sampled_from("abc"),
            url=st.sampled_from(["http://1:1", "http://2:1", "http://3:1"]),
            state=st.sampled_from(["ready", "draining", "restarting"]),
        ),
        max_size=4,
        unique_by=lambda member: member.id,
    )

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers(Metrics(), lambda: 0.0, sources=["x", "y"])
        self.workers.on_leave.append(self.left)
        self.lists: dict[str, list[Member]] = {}

    def left(self, worker: Worker) -> None:
        assert not worker.in_flight, "a worker that has requests is not removed"

    @rule(source=sources, members=members)
    def apply(self, source: str, members: list[Member]) -> None:
        self.lists[source] = members
        self.workers.apply(source, members)
        for worker in self.workers.all:
            worker.ready = True

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if ready := self.workers.ready:
            data.draw(st.sampled_from(ready)).in_flight += 1

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if busy := [worker for worker in self.workers.all if worker.in_flight]:
            data.draw(st.sampled_from(busy)).in_flight -= 1
        self.workers.remove_drained()

    @invariant()
    def the_last_lists_count(self) -> None:
        """The first source's entries, then those of the other that name no such worker."""
        first, second = self.lists.get("x", []), self.lists.get("y", [])
        ids, urls = {member.id for member in first}, {member.url for member in first}
        rest = [m for m in second if m.id not in ids and m.url not in urls]
        wanted = {(m.id, m.url): m.state != "ready" for m in (*first, *rest)}
        found = {(w.id, w.url): w.draining for w in self.workers.all if not w.is_gone}
        assert found == wanted
        assert all(worker.in_flight for worker in self.workers.all if worker.is_gone)
        slots = [worker.slot for worker in self.workers.all]
        assert len(set(slots)) == len(slots)
        for worker in self.workers.all:
            assert self.workers.find(worker.id) is not None


TestLists = Lists.TestCase
TestLists.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
