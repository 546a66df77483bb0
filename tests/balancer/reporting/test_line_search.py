"""A line is found in large files and their predecessors, the latest first, within a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.balancer.reporting import request_log
from sgl_ext.balancer.reporting.request_log import SearchTooLong, find_last_line, lines_backwards

MANY = 4000


def line_of(number: int, more: str = "") -> bytes:
    return b'{"id":"req_%d","x":"%b"}' % (number, more.encode())


def found(paths: list[Path], number: int) -> bytes | None:
    return find_last_line(paths, b'{"id":"req_%d",' % number, 1.0, lambda: 0.0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [tmp_path / "log", tmp_path / "log.1"]


@pytest.mark.parametrize("block_bytes", [97, 1024, 1 << 18])
def test_every_line_is_found_wherever_blocks_end(
    files: list[Path], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "_BLOCK_BYTES", block_bytes)
    lines = [line_of(number, "y" * (number % 50)) for number in range(60)]
    files[0].write_bytes(b"\n".join([*lines, b""]))
    assert [found(files, number) for number in range(60)] == lines
    assert found(files, 60) is None


def test_the_latest_of_several_is_found(files: list[Path]) -> None:
    files[1].write_bytes(line_of(1, "oldest") + b"\n" + line_of(2, "old") + b"\n")
    files[0].write_bytes(line_of(1, "older") + b"\n" + line_of(1, "new") + b"\n")
    assert found(files, 1) == line_of(1, "new")
    assert found(files, 2) == line_of(2, "old")


def test_a_beginning_inside_a_line_is_none(files: list[Path]) -> None:
    files[0].write_bytes(b'{"x":{"id":"req_1",}}\n')
    assert found(files, 1) is None


def test_a_line_that_is_being_written_is_not_found(files: list[Path]) -> None:
    files[0].write_bytes(line_of(1))
    assert found(files, 1) is None


def test_without_files_there_is_nothing(files: list[Path]) -> None:
    assert found(files, 1) is None


def test_a_search_ends_in_time(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "_BLOCK_BYTES", 1024)
    files[0].write_bytes(b"".join(line_of(n) + b"\n" for n in range(MANY)))
    now_s = iter(range(1000))
    with pytest.raises(SearchTooLong):
        find_last_line(files, b'{"id":"none",', 3.0, lambda: float(next(now_s)))
    assert next(now_s) == 5


@pytest.mark.parametrize("block_bytes", [7, 97, 1 << 18])
def test_lines_are_read_backwards(
    files: list[Path], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "_BLOCK_BYTES", block_bytes)
    assert list(lines_backwards(files)) == []
    lines = [line_of(number, "y" * (number % 50)) for number in range(60)]
    files[1].write_bytes(b"\n".join([*lines[:30], b""]))
    files[0].write_bytes(b"\n".join([*lines[30:], b'{"id":"not yet']))
    assert list(lines_backwards(files)) == lines[::-1]
    files[0].write_bytes(b'{"id":"not yet')
    assert list(lines_backwards(files)) == lines[29::-1]
