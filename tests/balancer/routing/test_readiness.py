"""A balancer is ready once it knows what every ready engine holds, and no engine can prevent it."""

from __future__ import annotations

import orjson

from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.readiness import Readiness
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Slots
from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import telling, until
from tests.balancer.workers import workers_at

A, B = "http://a", "http://b"
LIMIT_S = 30.0


class Case:
    """A readiness on a clock of the test's; `missing`: the engines that have sent no snapshot."""

    def __init__(
        self, *ready: str, prefixes: Prefixes | None = None, slots: Slots | None = None
    ) -> None:
        self.now_s = 100.0
        self.workers = workers_at([A, B], Metrics(), lambda: self.now_s, slots)
        for url in ready:
            self.mark(url, ready=True)
        self.missing = {A, B}
        self.readiness = Readiness(
            self.workers, self, prefixes or Prefixes(), LIMIT_S, lambda: self.now_s
        )

    def mark(self, url: str, *, ready: bool) -> None:
        worker = self.workers.find(url)
        assert worker is not None
        self.workers.mark(worker, ready=ready)

    def incomplete(self) -> list[Worker]:
        return [worker for worker in self.workers.ready if worker.url in self.missing]


def test_it_is_warm_once_every_ready_engine_has_sent_what_it_holds() -> None:
    case = Case(A, B)
    expected = "warming: 2 of 2 engines have not sent what they hold"
    assert case.readiness.reason_against() == expected
    case.missing = {B}
    expected = "warming: 1 of 2 engines have not sent what they hold"
    assert case.readiness.reason_against() == expected
    case.missing = set()
    assert case.readiness.reason_against() is None


def test_an_engine_that_is_not_ready_is_not_waited_for() -> None:
    case = Case(A)
    case.missing = {B}
    assert case.readiness.reason_against() is None


def test_an_engine_that_never_sends_a_snapshot_is_waited_for_up_to_the_limit() -> None:
    case = Case(A)
    assert case.readiness.reason_against() is not None
    case.now_s += LIMIT_S - 1
    assert case.readiness.reason_against() is not None
    case.now_s += 1
    assert case.readiness.reason_against() is None


def test_the_time_before_an_engine_is_ready_does_not_count() -> None:
    case = Case()
    assert case.readiness.reason_against() == "no engine is ready"
    case.now_s += 10 * LIMIT_S
    case.mark(A, ready=True)
    assert "warming" in str(case.readiness.reason_against())


def test_what_is_warm_stays_warm_when_an_engine_joins_or_restarts() -> None:
    case = Case(A)
    case.missing = set()
    case.readiness.note()
    case.missing = {A, B}
    case.mark(B, ready=True)
    assert case.readiness.reason_against() is None
    for url in (A, B):
        case.mark(url, ready=False)
    assert case.readiness.reason_against() == "no engine is ready"
    case.mark(A, ready=True)
    assert case.readiness.reason_against() is None


def test_the_processes_of_a_group_are_warm_when_the_one_that_writes_the_index_is() -> None:
    memory = GroupMemory(100).index
    writes = Case(A, B, prefixes=Prefixes(memory))
    looks_up = Case(A, B, prefixes=Prefixes(memory, writes=False))
    for case in (looks_up, writes, looks_up):
        assert "warming" in str(case.readiness.reason_against())
    writes.missing = set()
    for case in (writes, looks_up):
        assert case.readiness.reason_against() is None
    starts_again = Case(A, B, prefixes=Prefixes(memory))
    assert starts_again.readiness.reason_against() is None


def test_no_engine_is_ready_before_each_process_of_a_group_has_found_one() -> None:
    memory = GroupMemory(100)
    first, second = Case(A, slots=memory.slots(0)), Case(slots=memory.slots(1))
    for case in (first, second):
        case.missing = set()
        assert case.readiness.reason_against() == "no engine is ready"
    second.mark(B, ready=True)
    assert first.readiness.reason_against() == "no engine is ready"
    second.mark(A, ready=True)
    assert first.readiness.reason_against() is None
    assert second.readiness.reason_against() is None, "of the two, one is ready in both"


def test_a_process_waits_for_the_group_s_index_up_to_the_limit() -> None:
    case = Case(A, prefixes=Prefixes(GroupMemory(100).index, writes=False))
    assert case.readiness.reason_against() is not None
    case.now_s += LIMIT_S
    assert case.readiness.reason_against() is None


async def test_a_balancer_is_ready_when_the_last_line_of_each_snapshot_has_come(
    start: Start,
) -> None:
    line = {"seq": 0, "snapshot": True, "cleared": True, "publishes": ["prefixes"]}
    first = orjson.dumps(line) + b"\n"
    engine = telling("a", [first])
    client = await start(engine, Engine("publishes nothing"))
    answer = await client.get("/ready")
    assert answer.status == 503
    assert await answer.text() == "warming: 1 of 2 engines have not sent what they hold\n"
    assert (await client.get("/live")).status == 200
    assert (await client.post("/v1/messages", json={"messages": []})).status == 200
    engine.events[0].put_nowait(orjson.dumps({"seq": 1, "complete": True}) + b"\n")

    async def is_ready() -> bool:
        return (await client.get("/ready")).status == 200

    await until(is_ready)
    assert (await client.head("/ready")).status == 200


async def test_without_engines_a_balancer_lives_and_is_not_ready(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    assert (await client.get("/ready")).status == 200
    await client.delete("/sgl_ext/workers", params={"url": engine.url})
    answer = await client.get("/ready")
    assert (answer.status, await answer.text()) == (503, "no engine is ready\n")
    assert (await client.get("/live")).status == 200
    page = await (await client.get("/metrics")).text()
    assert 'path="/ready"' not in page
