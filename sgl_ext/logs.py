"""The log of a process: a line for each record, as text or as JSON.

    log.info("engine ready", extra={"engine": name})

    2026-01-02T03:04:05.678+00:00 INFO engine ready engine=engine-0
    {"time": "2026-01-02T03:04:05.678+00:00", "level": "info", "process": "balancer",
     "pid": 7, "message": "engine ready", "engine": "engine-0"}

A thread writes the lines, so a log that cannot be written delays nothing. A bounded number of lines
waits. Further lines are lost and counted, and the log says how many once it works again.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from datetime import datetime
from queue import Empty, Full, Queue
from typing import Any

import orjson

_WAITING_LINES = 2000
_LONGEST_LINE = 8192
_FLUSH_S = 1.0
_STDERR = 2
_TOGETHER = 100
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def write_logs(process: str, form: str, level: str, descriptor: int = _STDERR) -> None:
    """From now on, all records of this process from this level on go to this file alone.

    process: its name in lines of JSON. form: text or json. level: such as info.
    descriptor: a file that is open.
    """
    handler = LogWriter(descriptor)
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines())
    root = logging.getLogger()
    for former in tuple(root.handlers):
        root.removeHandler(former)
        former.close()
    root.addHandler(handler)
    root.setLevel(level.upper())


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    fields = vars(record).items()
    # Ray adds a private attribute to each record of a process that has imported it.
    return {name: value for name, value in fields if name not in _OWN and name[0] != "_"}


class TextLines(logging.Formatter):
    """Time, level, message and the fields; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        shown = "".join(f" {name}={_word(value)}" for name, value in fields_of(record).items())
        line = f"{_time(record)} {record.levelname} {_one_line(record.getMessage())}{shown}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """An object for each record, with its traceback as `error`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        return orjson.dumps(shown, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _word(value: object) -> str:
    text = _one_line(f"{value:.6g}" if isinstance(value, float) else str(value))
    return text if text and not set(text) & {" ", '"', "="} else orjson.dumps(text).decode()


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


class LogWriter(logging.Handler):
    """Hands lines to a thread that writes them. After a fork the child has a thread of its own."""

    def __init__(self, descriptor: int, waiting: int = _WAITING_LINES) -> None:
        """waiting: the most lines that wait to be written. lost: lines that were not written, and
        are not reported yet."""
        super().__init__()
        self._descriptor = descriptor
        self._most = waiting
        self.lost = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lines: Queue[str] = Queue(self._most)
        threading.Thread(target=self._write, args=(self._lines,), name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # a value that cannot be shown ends nothing
            line = f"{record.msg!r} cannot be logged"
        if len(line) > _LONGEST_LINE and not record.exc_info:
            line = f"{line[:_LONGEST_LINE]}..."
        try:
            self._lines.put_nowait(line)
        except Full:
            self.lost += 1

    def flush(self) -> None:
        """Waits until all lines are written, but not for long."""
        deadline = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write(self, lines: Queue[str]) -> None:
        while True:
            text = lines.get() + "\n"
            taken = 1
            with suppress(Empty):  # what waits goes out together
                while taken < _TOGETHER:
                    text += lines.get_nowait() + "\n"
                    taken += 1
            if lost := self.lost:
                text += self.format(_lost_record(lost)) + "\n"
            try:
                data = memoryview(text.encode(errors="replace"))
                while data:
                    data = data[os.write(self._descriptor, data) :]
                self._count(-lost)
            except OSError:
                self._count(taken)
            finally:
                for _ in range(taken):
                    lines.task_done()

    def _count(self, lines: int) -> None:
        self.acquire()
        self.lost += lines
        self.release()


def _lost_record(lost: int) -> logging.LogRecord:
    shown = {"msg": "lines of this log were lost", "levelname": "WARNING", "lines": lost}
    return logging.makeLogRecord(shown)
