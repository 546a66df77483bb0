"""The sources of workers, followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.workers import Workers, WorkerSources
from sgl_ext.membership.member import Member, MembershipError
from tests.waiting import HANG_S

ONE, TWO = Member(id="1", url="http://a:1"), Member(id="2", url="http://b:1")


class Scripted:
    """A source that says what its test puts in, and fails with the errors among it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: asyncio.Queue[tuple[Member, ...] | Exception] = asyncio.Queue()
        self.calls = 0

    async def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        self.calls += 1
        while True:
            said = await self.said.get()
            try:
                if isinstance(said, Exception):
                    raise said
                yield said
            finally:
                self.said.task_done()

    async def says(self, *said: tuple[Member, ...] | Exception) -> None:
        """Returns when all was applied."""
        for each in said:
            self.said.put_nowait(each)
        async with asyncio.timeout(HANG_S):
            await self.said.join()
            await asyncio.sleep(0)


class Followed:
    def __init__(self, *names: str) -> None:
        self.metrics = Metrics()
        self.workers = Workers(self.metrics, sources=names)
        self.all = [Scripted(name) for name in names]
        self.sources = WorkerSources(self.all, self.workers, self.metrics, retry_s=0.0)

    @property
    def ids(self) -> list[str]:
        return [worker.id for worker in self.workers.all]

    @property
    def page(self) -> str:
        return self.metrics.render().decode()


@asynccontextmanager
async def following(*names: str) -> AsyncIterator[Followed]:
    followed = Followed(*names)
    followed.sources.start()
    try:
        yield followed
    finally:
        await followed.sources.close()


async def test_each_list_replaces_the_one_before() -> None:
    async with following("x", "y") as followed:
        x, y = followed.all
        await x.says((ONE,))
        await y.says((TWO,))
        assert followed.ids == ["1", "2"]
        await x.says(())
        assert followed.ids == ["2"]


async def test_a_source_that_fails_keeps_its_last_list_and_is_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following("x") as followed:
        (x,) = followed.all
        await x.says((ONE,), MembershipError("no answer"), MembershipError("no answer"))
        assert followed.ids == ["1"]
        assert followed.sources.rows() == [{"name": "x", "workers": 1, "fault": "no answer"}]
        assert 'sgl_ext_membership_faults_total{source="x"} 2.0' in followed.page
        assert 'sgl_ext_membership_stale{source="x"} 1.0' in followed.page
        await x.says((TWO,))
        assert followed.ids == ["2"]
        assert followed.sources.rows() == [{"name": "x", "workers": 1, "fault": ""}]
        assert 'sgl_ext_membership_stale{source="x"} 0.0' in followed.page
    assert caplog.messages == ["x: no answer; its last list stays", "x: can be read again"]


async def test_a_source_with_a_fault_of_its_own_is_called_again() -> None:
    async with following("x") as followed:
        (x,) = followed.all
        await x.says((ONE,), RuntimeError("a fault"), (TWO,))
        assert followed.ids == ["2"]
        assert x.calls == 2
        assert 'sgl_ext_membership_faults_total{source="x"} 1.0' in followed.page
        assert 'sgl_ext_background_failures_total{task="membership"} 1.0' in followed.page


async def test_a_source_without_workers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with following("x") as followed:
        await followed.all[0].says((), (), (ONE,), ())
    assert caplog.messages == ["x: lists no workers"] * 2


async def test_the_start_waits_for_the_first_try_of_each_source() -> None:
    async with following("x", "y") as followed:
        x, y = followed.all
        await x.says(MembershipError("no answer"))
        waiting = asyncio.create_task(followed.sources.wait_until_tried(20))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert 'sgl_ext_membership_stale{source="y"} 1.0' in followed.page
        await y.says((ONE,))
        async with asyncio.timeout(HANG_S):
            await waiting
        assert followed.ids == ["1"]
        await followed.sources.wait_until_tried(0)
