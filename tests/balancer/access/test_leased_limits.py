"""Limits that several balancers share: leases, refunds, and what holds while the store fails."""

import logging
import os
from pathlib import Path

import pytest

from sgl_ext.balancer.access.authentication import KeyFileReloader, SharedKeys
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.keys import add_key, revoke_key
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.shared_memory import SharedMemory

LIMITS = "[tenants.a]\nrequests_per_minute = 600\ntokens_per_minute = 60000\n"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """Balancers that share their limits, on a made-up clock."""

    def __init__(self, folder: Path, text: str = LIMITS, count: int = 2) -> None:
        path = folder / "keys.toml"
        path.write_text(text)
        self.clock, self.metrics = Clock(), Metrics()
        self.state = SharedMemory(self.clock)
        self.all = [
            RateLimits(KeyFileReloader(path, made), made, 1, self.clock, self.state)
            for made in [self.metrics, *(Metrics() for _ in range(1, count))]
        ]

    async def admits(self, number: int, tokens: int = 0) -> bool:
        limits = self.all[number]
        if (lease := limits.lease("a", tokens)) is not None:
            await lease
        try:
            charge = limits.admit("a", tokens)
        except BalancerError:
            return False
        limits.settle(charge, tokens)
        return True

    async def second(self) -> None:
        self.clock.now_s += 1.0
        for limits in self.all:
            await limits.sync()

    async def serve(self, seconds: int, a_second: list[int], tokens: int = 0) -> int:
        """How many are admitted if so many arrive at each balancer in each second."""
        admitted = 0
        for _ in range(seconds):
            for number, count in enumerate(a_second):
                for _ in range(count):
                    admitted += await self.admits(number, tokens)
            await self.second()
        return admitted


@pytest.mark.parametrize("a_second", [[40, 40], [80, 0], [70, 10], [1000, 1000]])
async def test_a_limit_holds_over_balancers_however_requests_are_spread(
    tmp_path: Path, a_second: list[int]
) -> None:
    fleet = Fleet(tmp_path)
    first = await fleet.serve(1, [1000, 1000])
    assert first == pytest.approx(600, rel=0.05)
    later = await fleet.serve(120, a_second)
    assert later == pytest.approx(1200, rel=0.05)


async def test_tokens_are_limited_as_requests_are(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.serve(1, [500, 500], tokens=500)
    assert await fleet.serve(60, [5, 5], tokens=500) == pytest.approx(120, rel=0.05)


async def test_most_requests_ask_the_store_for_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "[tenants.a]\nrequests_per_minute = 60000\n")
    assert await fleet.serve(1, [10_000, 0]) == 10_000
    assert len(fleet.state.leases) < 30


async def test_a_tenant_over_its_limit_asks_the_store_for_little(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    assert await fleet.admits(0, tokens=60_000)
    asked = len(fleet.state.leases)
    for _ in range(1000):
        assert not await fleet.admits(0, tokens=50_000)
    assert len(fleet.state.leases) - asked < 10


async def test_what_an_idle_balancer_has_left_goes_to_the_others(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "[tenants.a]\nrequests_per_minute = 6000\n")
    assert await fleet.admits(0)  # and it leases a slice of 100
    for _ in range(2):
        await fleet.second()
    assert await fleet.serve(1, [0, 9000]) == 6000


async def test_a_request_above_a_full_limit_is_admitted_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    assert await fleet.admits(0, tokens=100_000)
    assert not await fleet.admits(0, tokens=100)
    assert not await fleet.admits(1, tokens=100)


async def test_while_the_store_fails_each_balancer_takes_its_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    fleet = Fleet(tmp_path)
    await fleet.second()
    await fleet.serve(1, [1000, 1000])
    fleet.state.is_away = True
    assert await fleet.serve(60, [40, 40]) == pytest.approx(600, rel=0.05)
    assert await fleet.serve(60, [80, 0]) == pytest.approx(300, rel=0.1)
    assert caplog.text.count("this process enforces 1/2 of each") == 2
    assert b"sgl_ext_tenant_limit_outages_total 1.0" in fleet.metrics.render()
    fleet.state.is_away = False
    await fleet.second()
    assert caplog.text.count("shared with other balancers again") == 2
    await fleet.serve(1, [1000, 1000])
    assert await fleet.serve(60, [80, 0]) == pytest.approx(600, rel=0.05)


async def test_an_outage_of_the_store_makes_no_limit_larger(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.second()
    admitted = await fleet.serve(1, [200, 200])
    fleet.state.is_away = True
    admitted += await fleet.serve(10, [100, 100])
    fleet.state.is_away = False
    admitted += await fleet.serve(10, [100, 100])
    assert admitted == pytest.approx(600 + 21 * 10, rel=0.05)


class Replicas:
    """Balancers on two nodes, each with a key file of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = SharedMemory(Clock())
        self.paths = [folder / "one.toml", folder / "two.toml"]
        self.key, self.name = add_key(self.paths[0], "ann")
        self.other, _ = add_key(self.paths[0], "ben")
        self.paths[1].write_bytes(self.paths[0].read_bytes())
        self.metrics = [Metrics(), Metrics()]
        self.files = [
            KeyFileReloader(path, made) for path, made in zip(self.paths, self.metrics, strict=True)
        ]
        self.shared = [
            SharedKeys(file, self.state, made)
            for file, made in zip(self.files, self.metrics, strict=True)
        ]

    async def second(self) -> None:
        for file, shared in zip(self.files, self.shared, strict=True):
            file.reload_if_changed()
            await shared.compare()

    def tenants(self, key: str) -> list[str | None]:
        return [file.keys.tenant_of(key.encode()) for file in self.files]


def make_newer(path: Path, than: Path) -> None:
    changed_ns = than.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(changed_ns, changed_ns))


async def test_a_key_that_is_revoked_on_one_balancer_is_revoked_on_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = Replicas(tmp_path)
    await replicas.second()
    assert replicas.tenants(replicas.key) == ["ann", "ann"]
    revoke_key(replicas.paths[0], replicas.name)
    make_newer(replicas.paths[0], replicas.paths[1])
    await replicas.second()
    assert replicas.tenants(replicas.key) == [None, None]
    assert replicas.tenants(replicas.other) == ["ben", "ben"]
    assert "another balancer reads a newer file" in caplog.text
    assert b"sgl_ext_key_file_older_total 1.0" in replicas.metrics[1].render()
    replicas.state.is_away = True
    await replicas.second()
    assert replicas.tenants(replicas.key) == [None, None]


async def test_what_the_store_says_gives_nobody_a_key(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path)
    added, _ = add_key(replicas.paths[0], "eve")
    make_newer(replicas.paths[0], replicas.paths[1])
    await replicas.second()
    assert replicas.tenants(added) == ["eve", None]
    replicas.paths[1].write_bytes(replicas.paths[0].read_bytes())
    make_newer(replicas.paths[1], replicas.paths[0])
    await replicas.second()
    assert replicas.tenants(added) == ["eve", "eve"]


async def test_the_same_file_copied_at_another_time_is_not_older(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = Replicas(tmp_path)
    make_newer(replicas.paths[0], replicas.paths[1])
    await replicas.second()
    await replicas.second()
    assert not caplog.records
