"""The request log's file: it never stops a request, and it keeps its limit."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession

from sgl_ext.balancer.cluster.peers import PeerGroup
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.request_log import LineFile, check_file
from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings, SettingsError
from tests.balancer.conftest import Engine, Start

LIMIT = 1 << 20
BODY = {"messages": [{"role": "user", "content": "Hello"}]}


async def counted(client: ClientSession, line: str) -> float:
    page = await (await client.get("/metrics")).text()
    return sum(
        float(each.rpartition(" ")[2]) for each in page.splitlines() if each.startswith(line)
    )


async def test_a_full_disk_under_the_log_stops_no_request(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start(Engine("a"), request_log="/dev/full")
    for _ in range(250):
        async with client.post("/v1/chat/completions", json=BODY) as answer:
            assert answer.status == 200
    failed = 'sgl_ext_background_failures_total{task="request_log"}'
    before = await counted(client, failed)
    while await counted(client, failed) <= before + 1:
        assert (await client.get("/health")).status == 200
    logged = [r for r in caplog.records if "request_log" in r.message and r.levelno >= 40]
    assert len(logged) == 1, "one line for each outage"


async def test_lines_beyond_the_buffer_are_dropped_and_counted() -> None:
    metrics = Metrics()
    count = metrics.request_log_dropped_lines
    file = LineFile(Path("/dev/full"), LIMIT, metrics)
    for _ in range(LIMIT):
        file.add(b"x\n")
    assert count.counts[()] == LIMIT - LIMIT // 4
    with pytest.raises(OSError, match="No space left"):
        await file.write()


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """No file of this process grows beyond a little more than this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_after_a_full_disk_the_log_has_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LineFile(path, LIMIT, Metrics())
    lines = [b"line %d\n" % number for number in range(30)]
    for number, line in enumerate(lines):
        file.add(line)
        if 10 <= number < 20:
            with full_disk(path), pytest.raises(OSError, match="large"):
                await file.write()
        else:
            await file.write()
    await file.close()
    assert path.read_bytes() == b"".join(lines)


async def test_several_processes_keep_the_limit_and_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "requests"
    metrics = Metrics()
    count = metrics.request_log_dropped_lines
    files = [LineFile(path, LIMIT, metrics) for _ in range(3)]
    last: dict[bytes, int] = {}
    for turn in range(40):
        for name, file in enumerate(files):
            for number in range(40):
                file.add(b"%d %d %b\n" % (name, turn * 40 + number, b"x" * 990))
        await asyncio.gather(*(file.write() for file in files))
        written = list(path.parent.iterdir())
        assert sum(each.stat().st_size for each in written) <= LIMIT
    for each in sorted(written, reverse=True):
        for line in each.read_bytes().splitlines():
            name, number, text = line.split()
            assert (len(text), int(number)) == (990, last.get(name, int(number) - 1) + 1)
            last[name] = int(number)
    assert list(last.values()) == [1599] * 3
    assert {each.stat().st_mode & 0o777 for each in written} == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert count.counts[()] == 0


async def test_a_log_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LineFile(path, LIMIT, Metrics())
    for line in (b"a\n", b"b\n"):
        path.unlink(missing_ok=True)
        file.add(line)
        await file.write()
        assert path.read_bytes() == line


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"request_log=.*Is a directory"):
        check_file(str(tmp_path))


async def test_snapshots_are_written_again_after_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as mine:
        mine.bind(("127.0.0.1", 0))
        group = PeerGroup(0, b"secret", (mine,))
        settings = BalancerSettings(port=0, drain_s=0, store_limit_bytes=0)
        balancer = Balancer(settings, group, folder, interval_s=0.001)
        await balancer.start()
        failures = balancer._metrics.background_failures.counts
        while failures[("snapshots",)] < 3:
            await _turn()
        folder.mkdir()
        while not (folder / "0.prom").exists():
            await _turn()
        await balancer.stop()


async def _turn() -> None:
    await asyncio.sleep(0.001)


async def test_a_log_can_be_closed_in_the_moment_in_which_its_lines_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = asyncio.get_running_loop().create_future()

    async def to_thread(*_: object) -> None:
        await written

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    file = LineFile(tmp_path / "log", LIMIT, Metrics())
    file.add(b"x\n")
    writing = asyncio.ensure_future(file.write())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    written.set_result(None)
    ended = asyncio.ensure_future(file.close())  # runs just after the lines are written
    await asyncio.gather(writing, ended)
    assert file.find_waiting(b"x") is None


def line_at(time_s: float) -> bytes:
    return b'{"id":"x","trace":"","time":%d.5,"route":"/"}\n' % time_s


async def test_lines_are_not_kept_longer_than_their_age(tmp_path: Path) -> None:
    path, now_s = tmp_path / "log", [1000.0]
    file = LineFile(path, LIMIT, Metrics(), 600.0, lambda: now_s[0])
    kept: dict[int, list[int]] = {}
    for time_s in range(1000, 3000, 60):
        now_s[0] = time_s
        if time_s < 2000:
            file.add(line_at(time_s))
        await file.write()
        text = b"".join(each.read_bytes() for each in reversed(file.paths) if each.exists())
        kept[time_s] = [int(line.split(b'"time":')[1][:4]) for line in text.splitlines()]
    for time_s, times in kept.items():
        assert all(each > time_s - 600 - 60 for each in times)
        wanted = [each for each in range(1000, min(time_s + 1, 2000), 60) if each > time_s - 240]
        assert times[len(times) - len(wanted) :] == wanted
    assert not any(each.exists() for each in file.paths), "nothing is left of an idle node's"


async def test_a_file_whose_lines_say_no_time_stays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LineFile(path, LIMIT, Metrics(), 600.0, lambda: 1e9)
    file.add(b"x\n")
    await file.write()
    file.expire(2e9)
    assert path.read_bytes() == b"x\n"
