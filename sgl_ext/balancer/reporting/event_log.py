"""What happened on a node, in order: a file in its run folder with the last events.

    launcher ---- add --> lines that wait -- write --\
    balancer 0 -- add --> ...                         >-- events.jsonl <-- latest -- state, command
    balancer 1 -- add --> ...                        /

Adding an event never waits. A line waits in memory until `write` appends it, and the file is
locked meanwhile, so that the lines of all processes are whole and in one order. An event that
happens again within REPEAT_S is written once more at the end of that time, with how often.

When the file would grow beyond FILE_BYTES, it becomes FILE.1, in place of the one before. A line
has LINE_BYTES at most, so the two hold at least SHOWN events. Without a file the process remembers
its own last events.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from sgl_ext.balancer.metrics.instruments import Counter
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.request_log import open_locked
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers

SHOWN = 200
REPEAT_S = 60.0
LINE_BYTES = 640
FILE_BYTES = SHOWN * LINE_BYTES
MOST_WAITING = 256
_MOST_TEXT, _MOST_SUBJECT = 300, 100

Level = Literal["info", "warning", "error"]
LEVELS: dict[str, Level] = {
    "started": "info",
    "stopping": "info",
    "ready": "info",
    "restarted": "info",
    "restart": "info",
    "restart failed": "error",
    "crashed": "error",
    "unreachable": "error",
    "stalled": "error",
    "hung": "error",
    "failing": "error",
    "secret refused": "error",
    "added": "info",
    "left": "info",
    "draining": "warning",
    "drained": "warning",
    "reloaded": "info",
    "reload refused": "error",
    "limit reached": "warning",
    "pins refused": "warning",
    "cache off": "warning",
    "cache on": "info",
    "client version": "warning",
    "request convicted": "error",
    "store failed": "error",
    "source failed": "error",
    "events lost": "warning",
}
"""What can happen, and how bad it is."""


class NodeEvent(msgspec.Struct, frozen=True):
    """One event. kind: one of LEVELS. subject: what it is about, such as an engine. times: how
    often it happened since the same event before."""

    time_s: float
    kind: str
    level: Level
    subject: str
    text: str
    times: int = 1


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(NodeEvent)
_Key = tuple[str, str, str]


class EventLog:
    """The events of a node, as one of its processes adds and reads them."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """path: of the file that all processes of the node share. clock: the wall clock."""
        self._path = path
        self._clock = clock
        self._waiting: list[bytes] = []
        self._remembered: deque[NodeEvent] = deque(maxlen=SHOWN)
        self._recent: dict[_Key, tuple[float, int]] = {}
        self._lost = 0
        self._read: tuple[object, list[dict[str, Any]]] = (None, [])

    def add(self, kind: str, subject: str, text: str = "", times: int = 1) -> None:
        """Adds an event, now or, if it has happened within REPEAT_S, after that."""
        now_s = self._clock()
        key = kind, subject[:_MOST_SUBJECT], " ".join(text.split())[:_MOST_TEXT]
        if key in self._recent:
            since_s, more = self._recent[key]
            self._recent[key] = since_s, more + times
        elif len(self._recent) < MOST_WAITING:
            self._recent[key] = now_s, 0
            self._append(now_s, key, times)
        else:
            self._lost += times

    def _append(self, now_s: float, key: _Key, times: int) -> None:
        event = NodeEvent(round(now_s, 3), key[0], LEVELS[key[0]], key[1], key[2], times)
        if self._path is None:
            self._remembered.append(event)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(_line(event))
        else:
            self._lost += times

    def write(self) -> None:
        """Writes what waits. It waits for the disk: call it in a thread, once a second. Raises
        OSError; what waits is written by a later call then."""
        now_s = self._clock()
        for key, (since_s, more) in [*self._recent.items()]:
            if now_s - since_s >= REPEAT_S:
                del self._recent[key]
                if more:
                    self._recent[key] = now_s, 0
                    self._append(now_s, key, more)
        if self._lost and len(self._waiting) < MOST_WAITING:
            lost, self._lost = self._lost, 0
            self._append(now_s, ("events lost", "events", "more than can be kept"), lost)
        if self._path is not None and self._waiting:
            lines = [*self._waiting]
            _append_lines(self._path, b"".join(lines))
            del self._waiting[: len(lines)]

    def latest(self) -> list[dict[str, Any]]:
        """The last events of all processes, the oldest first. It reads the file: call it in a
        thread. A file that cannot be read has none."""
        if self._path is None:
            return [msgspec.structs.asdict(event) for event in self._remembered]
        paths = Path(f"{self._path}.1"), self._path
        stamp = [_stamp(path) for path in paths]
        if stamp != self._read[0]:
            lines = [line for path in paths for line in _lines(path)]
            events = [found for line in lines[-SHOWN:] if (found := _event(line)) is not None]
            self._read = stamp, [msgspec.structs.asdict(event) for event in events]
        return self._read[1]


def _line(event: NodeEvent) -> bytes:
    line = _ENCODER.encode(event) + b"\n"
    while len(line) > LINE_BYTES:
        text, subject = event.text[: len(event.text) // 2], event.subject
        if not event.text:
            subject = subject[: len(subject) // 2]
        event = msgspec.structs.replace(event, text=text, subject=subject)
        line = _ENCODER.encode(event) + b"\n"
    return line


def _append_lines(path: Path, data: bytes) -> None:
    while True:
        file = open_locked(path)
        try:
            size = os.fstat(file).st_size
            if not size or size + len(data) <= FILE_BYTES:
                os.write(file, data)
                return
            path.replace(f"{path}.1")
        finally:
            os.close(file)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def _event(line: bytes) -> NodeEvent | None:
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:  # a write that a full disk cut
        return None


# Finds the events of a balancer: it compares what its parts say with what they said before.
#
# No request waits for that, and no part knows of events. Changes of engines are the same in every
# process of a balancer, so the first process alone finds them.

# What an engine's state is as an event. `ended` is the launcher's, which knows why.
_STATES = {
    "ready": "ready",
    "draining": "draining",
    "drained": "drained",
    "breaker open": "failing",
    "hung": "hung",
    "stalled": "stalled",
    "secret refused": "secret refused",
    "unreachable": "unreachable",
}


class EventWatch:
    """Call `look` once a second."""

    def __init__(
        self, events: EventLog, metrics: Metrics, workers: Workers, *, is_first: bool
    ) -> None:
        """is_first: whether this is the first process of its balancer."""
        self._events = events
        self._workers = workers
        self._is_first = is_first
        self._states: dict[str, str] | None = None
        self._names: set[str] = set()
        self._refused: dict[str, int] = {}
        self._off: dict[str, list[str]] = {}
        limit = "limit reached"
        self._counters: list[tuple[Counter, str, str, str]] = [
            (metrics.requests_rejected, limit, "queue", "it was full, or requests waited too long"),
            (metrics.bodies_rejected, limit, "byte budget", "bodies and heads were rejected"),
            (metrics.connections_rejected, limit, "connections", "there were too many"),
            (metrics.retries_rejected, limit, "retries", "engines' 503 answers were passed on"),
            (metrics.request_log_dropped_lines, limit, "request log", "lines were dropped"),
            (
                metrics.limit_outages,
                "store failed",
                "store",
                "the limits of tenants are not shared",
            ),
        ]
        convicted = "it ended two engines, and is refused for some minutes"
        # Of counters with labels: a label that is meant, "" for any; without a subject, the first.
        self._labelled: list[tuple[Counter, str, str, str, str]] = [
            (metrics.store_events, "failed", "store failed", "store", "a read or write failed"),
            (metrics.suspect_requests, "convicted", "request convicted", "request", convicted),
            (metrics.tenant_rate_limited, "", limit, "", "the tenant was over a limit"),
        ]
        if is_first:
            kept = "it was changed and is wrong; its earlier content stays valid"
            self._labelled += [
                (metrics.membership_faults, "", "source failed", "", "it cannot be read"),
                (metrics.file_reloads, "refused", "reload refused", "", kept),
            ]
        self._counts = dict(self._now())

    def look(self) -> None:
        """Adds what has happened since the last call."""
        before, now = self._counts, dict(self._now())
        for key, count in now.items():
            if (more := count - before.get(key, 0)) > 0:
                kind, subject, text = key
                self._events.add(kind, subject, text, more)
        self._counts = now
        if self._is_first:
            self._look_at_engines()

    def _now(self) -> Iterable[tuple[tuple[str, str, str], int]]:
        for counter, kind, subject, text in self._counters:
            yield (kind, subject, text), counter.counts[()]
        for counter, meant, kind, subject, text in self._labelled:
            sums: dict[str, int] = {}
            for labels, count in counter.counts.items():
                if not meant or meant in labels:
                    shown = subject or str(labels[0])
                    sums[shown] = sums.get(shown, 0) + count
            for shown, count in sums.items():
                yield (kind, shown, text), count

    def _look_at_engines(self) -> None:
        workers = {worker.id: worker for worker in self._workers.all if not worker.is_gone}
        states = {name: worker.state for name, worker in workers.items()}
        before = self._states
        for name, worker in workers.items():
            if before is not None:
                self._note_state(worker, before.get(name), states[name])
            self._note_pins(worker, is_new=before is None)
            self._note_caches(worker)
        names = {worker.member.lasting_name for worker in workers.values()}
        for name in self._names - names:
            self._events.add("left", name)
        self._states, self._names = states, names
        self._refused = {name: self._refused.get(name, 0) for name in workers}
        self._off = {name: worker.caches_off for name, worker in workers.items()}

    def _note_state(self, worker: Worker, before: str | None, state: str) -> None:
        if before is None and worker.member.lasting_name not in self._names:
            self._events.add("added", worker.id, worker.url)
        if state == before or state not in _STATES:
            return
        if before is None and state != "ready":  # it starts
            return
        text = ""
        if state == "unreachable":
            text = worker.cause
        elif state == "draining" and worker.is_expected:
            text = "it restarts"
        self._events.add(_STATES[state], worker.id, text)

    def _note_caches(self, worker: Worker) -> None:
        was_off = self._off.get(worker.id, [])
        for name in worker.caches_off:
            if name not in was_off:
                self._events.add("cache off", worker.id, name)
        for name in was_off:
            if name not in worker.caches_off:
                self._events.add("cache on", worker.id, name)

    def _note_pins(self, worker: Worker, *, is_new: bool) -> None:
        count = sum(worker.report.get("pins_declined", {}).values())
        more = count - self._refused.get(worker.id, 0)
        if more > 0 and not is_new:
            self._events.add("pins refused", worker.id, "marks got no pin: guide/pins.md", more)
        self._refused[worker.id] = count
