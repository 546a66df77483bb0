"""The log of a process: its lines, and that it holds up nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sgl_ext.logs import LogWriter, TextLines, fields_of, write_logs
from sgl_ext.settings.fields import changed
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings, Tenant

LOST = "lines of this log were lost"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is afterwards as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level


def _logged(root: logging.Logger, form: str, level: str, path: Path) -> list[str]:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    root.handlers.clear()
    write_logs("balancer", form, level, descriptor)
    log = logging.getLogger("a")
    log.debug("too much")
    fields = {"engine": "a b", "tokens": 7, "share": 1 / 3, "_of_a_library": 1}
    log.info("engine %s", "ready", extra=fields)
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        log.exception("two\nlines")
    root.handlers[0].flush()
    os.close(descriptor)
    return path.read_text().splitlines()


def test_a_line_of_text_has_time_level_message_and_fields(
    root: logging.Logger, tmp_path: Path
) -> None:
    first, second, *trace = _logged(root, "text", "info", tmp_path / "log")
    assert first.split(" ", 1)[1] == 'INFO engine ready engine="a b" tokens=7 share=0.333333'
    assert first[:11].endswith("T")
    assert first[10] == "T"
    assert second.endswith("ERROR two\\nlines")
    assert trace[0].startswith("Traceback")
    assert trace[-2:] == ["ValueError: bad", "value"]


def test_a_line_of_json_has_the_same_and_the_process(root: logging.Logger, tmp_path: Path) -> None:
    first, second = map(json.loads, _logged(root, "json", "info", tmp_path / "log"))
    assert {key: first[key] for key in ("level", "process", "message", "engine", "tokens")} == {
        "level": "info",
        "process": "balancer",
        "message": "engine ready",
        "engine": "a b",
        "tokens": 7,
    }
    assert second["message"] == "two\nlines"
    assert "ValueError: bad" in second["error"]


def test_less_important_lines_are_left_out(root: logging.Logger, tmp_path: Path) -> None:
    assert "engine ready" not in "".join(_logged(root, "text", "error", tmp_path / "log"))


def _record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text, "levelname": "INFO"})


def test_a_pipe_that_nobody_reads_holds_up_nothing_and_what_is_lost_is_counted() -> None:
    read, write = os.pipe()
    writer = LogWriter(write, waiting=10)
    writer.setFormatter(TextLines())
    line = "x" * 8000
    for _ in range(200):
        writer.handle(_record(line))
    assert writer.lost >= 50  # a pipe has room for 8 lines, and 110 wait at most
    received: list[bytes] = []

    def read_all() -> None:
        while data := os.read(read, 1 << 20):
            received.append(data)

    reader = threading.Thread(target=read_all)
    reader.start()
    writer.flush()
    writer.handle(_record("works again"))
    writer.flush()
    os.close(write)
    reader.join()
    os.close(read)
    lines = b"".join(received).decode().splitlines()
    lost = sum(int(text.rsplit("=", 1)[1]) for text in lines if LOST in text)
    assert lost + sum(text.endswith(line) for text in lines) == 200


def test_a_full_disk_ends_nothing() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = LogWriter(full)
    writer.setFormatter(TextLines())
    writer.handle(_record("lost"))
    writer.flush()
    os.close(full)
    assert writer.lost == 1


def test_lines_are_written_before_a_process_ends_also_by_a_fork() -> None:
    code = """
import logging, os
from sgl_ext.logs import write_logs
write_logs("a", "text", "info")
logging.info("parent")
if os.fork() == 0:
    logging.info("child")
    logging.shutdown()
    os._exit(0)
os.wait()
logging.info("end")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line.split()[-1] for line in ended.stderr.splitlines()]
    assert (sorted(said[:2]), said[2:]) == (["child", "parent"], ["end"])


def test_the_settings_that_a_log_shows_differ_from_the_defaults_and_hold_no_secret() -> None:
    balancer = BalancerSettings(
        port=31000,
        store="redis://user:password@host/1",
        api_key="file:key",
        tenants=(Tenant("a", 3),),
    )
    args = ("--api-key", "hidden", "--admin-api-key=hidden", "--dtype", "float16", "--trust")
    settings = LaunchSettings(model_path="m", tp=2, balancer=balancer, engine_args=args)
    assert changed(settings) == {
        "model_path": "m",
        "tp": 2,
        "engine_args": "--api-key ... --admin-api-key=... --dtype float16 --trust",
        "port": 31000,
        "store": "...",
        "api_key": "file:key",
        "tenants": ["a"],
    }
    assert changed(BalancerSettings(store=".run/store.sqlite")) == {"store": ".run/store.sqlite"}


def test_every_setting_can_be_a_field_of_a_line() -> None:
    names = {field.name for field in msgspec.structs.fields(BalancerSettings)}
    names |= {field.name for field in msgspec.structs.fields(LaunchSettings)}
    record = logging.getLogger("a").makeRecord(
        "a", logging.INFO, "", 0, "m", (), None, extra=dict.fromkeys(names, 1)
    )
    assert fields_of(record).keys() == names
