"""Probes of engines that are silent: which are made to generate a token, by a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.placement import Placement
from scheduler.silence import HANG_S, STALLED_S, Signs
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.routing_request import NO_ROUTING
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.member import Member

OLD_S, WORKS, WAITS = 1e6, 5000, 0


class Probes(WorkerProbes):
    """Probes of an engine that answers as the test says."""

    def set(self, **given: Any) -> None:
        for name, value in given.items():
            object.__setattr__(self, name, value)

    async def _signs(self, _: Any) -> Signs | None:
        return self.signs  # type: ignore[no-any-return,attr-defined]

    async def _generates(self, _: Any) -> bool:
        self.generated.append(self.clock())  # type: ignore[attr-defined]
        return self.is_well  # type: ignore[no-any-return,attr-defined]

    async def _ready(self, _: Any) -> tuple[int, dict[str, str], str]:
        return self.status, {}, ""  # type: ignore[attr-defined]


@pytest.fixture
def engine() -> Any:
    """An engine with a request, and the probes of it once a second."""
    workers, now, lost = Workers(Metrics()), SimpleNamespace(s=0.0), list[str]()
    workers.apply("list", [Member(id="a", url="http://a:1")])
    (worker,) = workers.all
    probes = Probes(workers, None, lambda *_: None, clock=lambda: now.s)  # type: ignore[arg-type]
    probes.set(signs=None, is_well=False, generated=[], status=200)
    worker.ready, worker.in_flight = True, 1
    worker.report = {"running": 1}

    class Attempt:
        def __init__(self, sent_s: float | None = 0.0, uncached_tokens: int = 0) -> None:
            self.sent_s = sent_s
            self.uncached_tokens = uncached_tokens
            worker.attempts.add(self)  # type: ignore[arg-type]

        def abandon(self, why: str) -> None:
            lost.append(why)
            worker.attempts.discard(self)  # type: ignore[arg-type]

    Attempt()

    async def wait(until_s: float, each: Callable[[], object] = lambda: None) -> None:
        while now.s < until_s:
            now.s += 1
            each()
            await probes.probe(worker)

    return SimpleNamespace(
        worker=worker, probes=probes, wait=wait, lost=lost, now=now, attempt=Attempt, all=workers
    )


async def test_a_compilation_of_minutes_loses_no_request(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.probes.set(signs=Signs(OLD_S, WORKS))
    await engine.wait(599)
    assert (engine.probes.generated, engine.lost) == ([], [])
    assert engine.worker.is_available
    said = [record.message for record in caplog.records]
    assert said == ["engine silent for 60 s: it has just started, or compiles"], "it is said once"
    engine.worker.last_heard_s = engine.now.s
    await engine.wait(650)
    assert not engine.worker.is_busy


async def test_an_engine_that_waits_in_a_loop_hangs_after_a_minute(engine: Any) -> None:
    engine.probes.set(signs=Signs(OLD_S, WAITS))
    await engine.wait(HANG_S + 1)
    assert engine.lost == ["the engine hangs"]
    assert engine.worker.is_hung


async def test_one_that_stops_to_work_hangs_after_a_minute(engine: Any) -> None:
    engine.probes.set(signs=Signs(OLD_S, WORKS))
    await engine.wait(200)
    engine.probes.set(signs=Signs(OLD_S, WAITS))
    await engine.wait(259)
    assert engine.lost == []
    await engine.wait(260)
    assert engine.lost == ["the engine hangs"]


async def test_a_compiler_that_touches_memory_now_and_then_works(engine: Any) -> None:
    def show() -> None:
        engine.probes.set(signs=Signs(OLD_S, WORKS if engine.now.s % 50 == 0 else WAITS))

    await engine.wait(400, show)
    assert engine.lost == []


async def test_one_that_seems_to_work_for_ever_hangs_at_the_time_limit(engine: Any) -> None:
    engine.probes.set(signs=Signs(OLD_S, WORKS))
    await engine.wait(601)
    assert engine.probes.generated[0] == 600
    assert engine.lost == ["the engine hangs"]


async def test_an_engine_that_has_just_started_has_longer(engine: Any) -> None:
    """Another engine may compile the kernels that it waits for."""
    engine.probes.set(signs=Signs(0, WAITS))

    def age() -> None:
        engine.probes.set(signs=Signs(engine.now.s, WAITS))

    await engine.wait(599, age)
    assert engine.lost == []
    await engine.wait(601, age)
    assert engine.lost == ["the engine hangs"]


async def test_one_that_says_nothing_is_checked_as_before(engine: Any) -> None:
    await engine.wait(HANG_S + 1)
    assert engine.lost == ["the engine hangs"]
    engine.probes.set(is_well=True)
    await engine.wait(engine.now.s + 1)
    assert not engine.worker.is_hung


async def test_an_engine_that_stands_still_gets_nothing_new_until_it_steps(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.wait(STALLED_S - 1)
    assert engine.worker.is_available
    await engine.wait(STALLED_S)
    assert not engine.worker.is_available
    assert (engine.worker.state, engine.worker.ready) == ("stalled", True)
    assert engine.worker.fault == "its scheduler stands still"
    assert engine.lost == [], "what it began may still be answered"
    engine.worker.heard(engine.now.s)
    assert engine.worker.is_available
    await engine.wait(engine.now.s + 1)
    said = [record.message for record in caplog.records]
    assert said == ["engine stands still", "engine works again"]


async def test_a_long_prompt_may_take_longer(engine: Any) -> None:
    engine.worker.pace.tokens_per_s = 10_000.0
    engine.attempt(uncached_tokens=50_000)
    await engine.wait(STALLED_S + 14)
    assert engine.worker.is_available
    await engine.wait(STALLED_S + 15)
    assert not engine.worker.is_available


async def test_one_that_compiles_does_not_stand_still(engine: Any) -> None:
    engine.probes.set(signs=Signs(OLD_S, WORKS))
    await engine.wait(200)
    assert engine.worker.is_available
    engine.probes.set(signs=Signs(OLD_S, WAITS))
    await engine.wait(200 + STALLED_S)
    assert not engine.worker.is_available


async def test_silence_does_not_begin_anew_when_clients_leave(engine: Any) -> None:
    """Clients with less patience than the limit come and go."""
    worker = engine.worker
    attempt = Attempt(NO_ROUTING, worker, worker, Placement(worker.id, "new"))

    def come_and_go() -> None:
        if worker.in_flight:
            worker.leave(attempt, 0)
            worker.left(0)
        else:
            worker.enter(attempt, 0, engine.now.s)

    await engine.wait(STALLED_S + 1, come_and_go)
    assert not worker.is_available
    await engine.wait(HANG_S + 1, come_and_go)
    assert worker.is_hung


async def test_what_an_engine_cannot_have_seen_goes_elsewhere(engine: Any) -> None:
    engine.attempt(sent_s=1.0)
    late, unsent = engine.attempt(sent_s=4.0), engine.attempt(sent_s=None)
    await engine.wait(STALLED_S)
    assert engine.lost == [], "no other engine is there"
    engine.all.apply("more", [Member(id="b", url="http://b:1")])
    engine.all.mark(engine.all.find("b"), ready=True)
    await engine.wait(STALLED_S + 1)
    assert engine.lost == ["the engine stands still"] * 2
    assert not {late, unsent} & engine.worker.attempts
    assert len(engine.worker.attempts) == 2


async def test_a_request_that_its_scheduler_never_saw_stops_no_engine(engine: Any) -> None:
    engine.worker.in_flight = 0
    engine.worker.left(0)
    engine.probes.set(is_well=True)
    await engine.wait(STALLED_S)
    assert engine.probes.generated == [STALLED_S]
    assert engine.worker.is_available
    await engine.wait(5 * STALLED_S)
    assert engine.probes.generated == [STALLED_S], "it owes nothing any more"


async def test_how_long_an_engine_hangs_is_counted_unless_it_was_stopped(engine: Any) -> None:
    await engine.wait(HANG_S + 5)
    assert engine.worker.hung_s == HANG_S
    engine.probes.set(is_well=True)
    await engine.wait(HANG_S + 6)
    assert engine.worker.hung_s is None
    engine.probes.set(is_well=False, status=504)
    await engine.wait(HANG_S + 7)
    assert engine.worker.is_hung
    assert engine.worker.hung_s is None
