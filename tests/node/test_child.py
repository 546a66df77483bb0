"""A child process of the node, and the reason in its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sgl_ext.node.child import READY, Child, StartLog, stage_of


def test_lines_about_leaks_do_not_hide_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    leaks = "nanobind: leaked 513 functions!\n" + ' - leaked function "f"\n' * 20
    leaks += " - ... skipped remainder\nnanobind: this is likely caused by a bug.\n"
    log.write_text(f"before\n\nthe reason\n{leaks}See https://nanobind.readthedocs.io/refleaks\n")
    child = Child("engine-0", (), {}, log, "http://127.0.0.1:1")
    assert child.last_lines(1) == ["the reason"]
    assert child.last_lines(5) == ["before", "the reason"]


def _append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_the_stage_follows_the_log_and_counts_the_shards_of_the_weights(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    start = StartLog(log)
    assert start.stage() == ("importing", None)
    _append(log, "a warning\n[12:00] server_args={'a': " + "x" * 20_000 + "}\n")
    assert start.stage() == ("starting the scheduler", None)
    _append(log, "[12:01] Load weight begin. avail mem=21.48 GB\nMulti-thread loading shards:")
    assert start.stage() == ("loading weights", None)
    _append(log, "  25% Completed | 1/4 [00:00<?]\rMulti-thread loading shards:  50% Comp")
    assert start.stage() == ("loading weights", 0.5)
    _append(log, "leted | 2/4\r\n[12:02] Load weight end. elapsed=0.03 s\n")
    assert start.stage() == ("loaded weights", None)
    _append(log, "[12:03] Capture decode CUDA graph begin. backend=full\n")
    _append(log, "Capturing batches (bs=8 avail_mem=1.00 GB):  75%|xxx  | 3/4\r")
    assert start.stage() == ("capturing CUDA graphs", 0.75)
    _append(log, "[12:04] The server is fired up and ready to roll!\n")
    assert start.stage() == (READY, None)


def test_what_the_extension_says_for_the_operator_is_noted_once(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    start = StartLog(log)
    log.write_text("sgl-ext: --enable-lmcache: " + "x" * 300 + "\n[12:00 TP0] sgl-ext: half a l")
    start.stage()
    _append(log, "ine\nnot sgl-ext: a line\nsgl-ext: --enable-lmcache: " + "x" * 300 + "\n")
    start.stage()
    assert [*start.notes] == ["--enable-lmcache: " + "x" * 300, "half a line"]


def test_a_log_that_was_rotated_is_read_on(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("server_args={}\n" + "x" * 1000)
    start = StartLog(log)
    start.stage()
    log.write_text("Load weight begin\n")
    assert start.stage() == ("loading weights", None)


def test_a_fleet_counts_its_engines(tmp_path: Path) -> None:
    log = tmp_path / "fleet.log"
    start = StartLog(log, keeps_fleet=True)
    assert start.stage() == ("connecting to Ray", None)
    _append(log, "2026-01-01 12:00:00,000 1 of 4 engines serve\n")
    assert start.stage() == ("1 of 4 engines serve", 0.25)
    _append(log, "2026-01-01 12:00:09,000 all engines serve\n")
    assert start.stage() == (READY, None)


@pytest.mark.parametrize("was_rotated", [False, True])
async def test_a_second_start_begins_at_the_first_stage(
    tmp_path: Path, *, was_rotated: bool
) -> None:
    log = tmp_path / "engine.log"
    child = Child("engine-0", [sys.executable, "-c", "print('server_args=')"], {}, log, "")
    log.write_text("x" * 100 + "The server is fired up\n")
    assert stage_of(child) == (READY, None)
    if was_rotated:
        log.write_text("")
    await child.start()
    assert await child.wait() == 0
    assert stage_of(child) == ("starting the scheduler", None)
