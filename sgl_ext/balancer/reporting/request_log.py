"""Counts every answered request, and keeps what became of each request, answered or not.

With a request log, which a node has unless it is `off`, that is a line of JSON in a file, which all
processes of a balancer share. Without it the latest requests are remembered: by each process
itself, and for the others in a small file in the folder that they share. A line says of one
request:

    {"id", "trace", "time", "route", "status", "outcome", "error", "error_type", "worker", "reason",
     "workers", "tenant", "harness", "client", "moved_lines", "model", "served_model", "session",
     "prefix_hash", "tools_hash", "tools_count", "segments", "prompt_tokens", "predicted_tokens",
     "expected_tokens", "reported_tokens", "counted_tokens", "output_tokens", "queue_ms",
     "prefix_ms", "ttft_ms", "total_ms", "attempts", "divergence", "saved_bytes"}

`outcome` is one of `Outcome`. `workers` are those that it could have gone to at its last attempt,
the cheapest first, at most MOST_WORKERS of them, with their costs as `explain` shows them.
`predicted_tokens` counts the prompt tokens that the engine was known to have cached.
`expected_tokens` adds those that another request was still computing there. `reported_tokens`,
`counted_tokens` and `output_tokens` are the engine's own: read from its cache, in the whole
prompt, and generated. `queue_ms` is the whole time until the request was sent, if it had to wait;
`prefix_ms` is the part of it in which another request computed a prefix that this one needs.
`prefix_hash` is equal for prompts of a tenant and a model that have the same tools and instructions
in the same order, `tools_hash` for those with the same tools; both are null if there are none.
`divergence` is null unless the prompt diverges from an earlier one (docs/guide/doctor.md).
`saved_bytes` is what the client did not send because its request named what is stored.

`model` is the name that the request has, if its prompt was compared, and `served_model` the model
that answers it. `harness` and `client` are what the client says about itself (`reading/client.py`).
`session` is the id that the client states, and after a slash that of its sub-agent, or a hash
(`reading/client.py`). Prefixes are hashes. No text of a prompt is written.

A `LineFile` is written by a thread: adding a line never waits. Lines wait in memory, within a
bound, until they are written; a write that failed is made again. What exceeds the bound is dropped
and counted. When the file would grow beyond half of its limit, or its first line is older than half
of the longest age, it becomes FILE.1, in place of the one before, and a new file begins. A FILE.1
whose last line is too old is deleted.

A search reads the files backwards, as those who look for a request mostly look for a late one.
Blocks are small, so that a search in a thread leaves the interpreter to others between them.
"""

import asyncio
import fcntl
import logging
import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson

from scheduler.placement import PlacementRequest, WorkerView, score_all
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.activity import Activity, reason_of
from sgl_ext.balancer.reporting.diagnosis import Detector, PromptDiagnosis
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.doctor.report import version_sentence
from sgl_ext.doctor.requests import Search
from sgl_ext.key_file import KeyFile
from sgl_ext.prompts.heads import NEW_VERSION, VERSION
from sgl_ext.reading.client import NO_FACTS, ClientFacts
from sgl_ext.reading.usage import Usage
from sgl_ext.settings.schema import SettingsError
from sgl_ext.tenants import Tenants

MOST_WORKERS = 8


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    """An engine's answer was sent to its end, whatever its status."""
    REJECTED = "rejected"
    """The balancer answered an error before any engine had the request."""
    FAILED = "failed"
    """The balancer answered an error after an engine had the request."""
    CUT = "cut"
    """The stream ended in an error event."""
    DISCONNECTED = "disconnected"
    """The client left."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request and its end. It holds no prompt, so that many can be remembered.

    trace: the id of its trace. time_s: when it ended.
    status: of the answer; None if none had begun. error: why it failed, None if it did not, or if
        the client's own words may be in it. error_type: of an answer that is an error, by whomever.
    considered: the workers at its last attempt; empty if it had none.
    """

    request_id: str
    trace: str
    route: str
    time_s: float
    status: int | None
    outcome: Outcome
    error: str | None
    error_type: str | None
    usage: Usage | None
    worker: str | None
    reason: str | None
    considered: Sequence[WorkerView]
    tenant: str
    session: str | None
    prefix_hash: int | None
    tools_hash: int | None
    tools_count: int
    segments: int
    prompt_tokens: int
    predicted_tokens: int | None
    expected_tokens: int | None
    queued_s: float
    ttft_s: float
    total_s: float
    attempts: int
    diagnosis: PromptDiagnosis | None
    facts: ClientFacts = NO_FACTS
    saved_bytes: int = 0
    moved: Mapping[str, int] = {}
    prefix_s: float = 0.0
    model: str = ""


class Name(NamedTuple):
    """What a request is found by. trace: the id of its trace. route: as metrics name its path.
    model: that answers it."""

    request_id: str
    trace: str
    route: str
    model: str = ""


class End(NamedTuple):
    """How a request ended. usage: as its answer states it. The rest is as of an `EndedRequest`."""

    time_s: float
    status: int | None
    outcome: Outcome
    error: str | None = None
    usage: Usage | None = None
    error_type: str | None = None


class Course(NamedTuple):
    """How long a request took, and how often it was sent to a worker.

    prefix_s: the part of `queued_s` in which another request computed a prefix that this one needs.
    """

    queued_s: float
    ttft_s: float
    total_s: float
    attempts: int
    prefix_s: float = 0.0


class Finding(NamedTuple):
    """What was found in a request when it was read."""

    diagnosis: PromptDiagnosis | None = None
    facts: ClientFacts = NO_FACTS
    saved_bytes: int = 0
    moved: Mapping[str, int] = {}


NOTHING_FOUND = Finding()


def ended_request(
    name: Name,
    end: End,
    course: Course,
    routing: RoutingRequest,
    attempt: Attempt | None = None,
    finding: Finding = NOTHING_FOUND,
) -> EndedRequest:
    """A request that has ended; `attempt` was its last."""
    worker = reason = predicted_tokens = expected_tokens = None
    considered: Sequence[WorkerView] = ()
    if attempt is not None:
        worker, reason, considered = attempt.worker.id, attempt.placement.reason, attempt.considered
        predicted_tokens, expected_tokens = attempt.predicted_tokens, attempt.expected_tokens
        if len(considered) > MOST_WORKERS:
            considered = _cheapest(considered, worker, routing.prompt_tokens, reason)
    segments = routing.chain
    hashes, head, tools = segments.hashes, segments.head_segments, segments.tool_segments
    return EndedRequest(
        name.request_id,
        name.trace,
        name.route,
        end.time_s,
        end.status,
        end.outcome,
        end.error,
        end.error_type,
        end.usage,
        worker,
        reason,
        considered,
        routing.tenant,
        routing.session_name,
        hashes[head - 1] if head else None,
        hashes[tools - 1] if tools else None,
        segments.tools,
        len(hashes),
        routing.prompt_tokens,
        predicted_tokens,
        expected_tokens,
        course.queued_s,
        course.ttft_s,
        course.total_s,
        course.attempts,
        finding.diagnosis,
        finding.facts,
        finding.saved_bytes,
        finding.moved,
        course.prefix_s,
        name.model,
    )


def start_of_line(request_id: str) -> bytes:
    """How the line of a request with this id begins."""
    return b'{"id":%b,' % orjson.dumps(request_id)


def as_line(ended: EndedRequest) -> bytes:
    """The line of a request."""
    found, known, usage = ended.diagnosis, ended.facts.known(), ended.usage
    record: dict[str, Any] = {
        "id": ended.request_id,
        "trace": ended.trace,
        "time": int(ended.time_s * 1e3) / 1e3,
        "route": ended.route,
        "status": ended.status,
        "outcome": ended.outcome,
        "error": ended.error,
        "error_type": ended.error_type,
        "worker": ended.worker,
        "reason": ended.reason,
        "workers": _rows(ended),
        "tenant": ended.tenant,
        "harness": ended.facts.harness,
        "client": {name: value for name, value in known.items() if name != "harness"},
        "moved_lines": ended.moved,
        "model": None if found is None else found.model,
        "served_model": ended.model or None,
        "session": ended.session,
        "prefix_hash": _hex(ended.prefix_hash),
        "tools_hash": _hex(ended.tools_hash),
        "tools_count": ended.tools_count,
        "segments": ended.segments,
        "prompt_tokens": ended.prompt_tokens,
        "predicted_tokens": ended.predicted_tokens,
        "expected_tokens": ended.expected_tokens,
        "reported_tokens": None if usage is None else usage.cached_tokens,
        "counted_tokens": None if usage is None else usage.prompt_tokens,
        "output_tokens": None if usage is None else usage.output_tokens,
        "queue_ms": int(ended.queued_s * 1e6) / 1e3,
        "prefix_ms": int(ended.prefix_s * 1e6) / 1e3,
        "ttft_ms": int(ended.ttft_s * 1e6) / 1e3,
        "total_ms": int(ended.total_s * 1e6) / 1e3,
        "attempts": ended.attempts,
        "divergence": None if found is None else found.divergence,
        "saved_bytes": ended.saved_bytes,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _rows(ended: EndedRequest) -> list[dict[str, Any]]:
    """The workers that it could have gone to, the cheapest first. Where only some of them are
    listed, their sessions count against the mean of these."""
    request, is_new = PlacementRequest(ended.prompt_tokens, 0), _is_new(ended.reason)
    views = ended.considered
    scores = score_all(request, views, is_new=is_new)
    return [
        {
            "name": cost.name,
            "cost": round(cost.cost),
            "held_tokens": view.held_tokens,
            "host_tokens": view.host_tokens,
            "shared_tokens": view.shared_tokens,
            "pending": cost.pending,
            "uncached": cost.uncached,
            "loaded": round(cost.loaded),
            "decoding": cost.decoding,
            "recent": round(cost.recent),
            "sessions": round(cost.sessions),
            "prefill_weight": view.prefill_weight,
            "decode_weight": view.decode_weight,
        }
        for cost, view in sorted(zip(scores, views, strict=True), key=lambda each: each[0].cost)
    ]


def _cheapest(
    views: Sequence[WorkerView], chosen: str, prompt_tokens: int, reason: str
) -> Sequence[WorkerView]:
    """The chosen worker and the cheapest others."""
    request, is_new = PlacementRequest(prompt_tokens, 0), _is_new(reason)
    costs = {score.name: score.cost for score in score_all(request, views, is_new=is_new)}
    return sorted(views, key=lambda view: (view.name != chosen, costs[view.name]))[:MOST_WORKERS]


def _is_new(reason: str | None) -> bool:
    """Whether a placement for this reason counts the terms of a session's first request."""
    return reason in ("new", "lost")


def _hex(number: int | None) -> str | None:
    return None if number is None else f"{number:032x}"


log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
TIME = re.compile(rb'"time":([0-9]{1,12}(?:\.[0-9]{1,9})?),')
"""When the request of a line ended."""
_HEAD_BYTES = 1024
_CLOSE_S = 2.0
# How often the ages of the files are looked at.
_LOOK_S = 60.0


def check_file(path: str) -> None:
    """Makes the file. Raises SettingsError if it cannot be written."""
    try:
        os.close(open_locked(Path(path)))
    except OSError as error:
        raise SettingsError(f"request_log={path!r}: {error.strerror}") from None


class LineFile:
    """The lines of one process. Those that were lost are counted.

    limit_bytes: the largest size of the file and its predecessor together.
    age_s: the oldest line that the log holds. clock: by which lines state their time.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        metrics: Metrics,
        age_s: float = inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._clock = clock
        self._looked_s = -inf
        self.change(limit_bytes, age_s)
        self._dropped = metrics.request_log_dropped_lines
        self._lines: list[bytes] = []
        self._bytes = 0
        size, limit = (lambda: self._bytes), (lambda: self._buffer_bytes)
        metrics.tables.add("request_log_lines", size, limit, "bytes")
        self._writing: asyncio.Future[None] | None = None

    def change(self, limit_bytes: int, age_s: float = inf) -> None:
        """Changes the largest size and the longest age. A file that is larger is replaced at its
        next write, and what is older within a minute."""
        self._age_s = age_s
        self._file_bytes = limit_bytes // 2
        self._buffer_bytes = min(BUFFER_BYTES, self._file_bytes)

    def add(self, line: bytes) -> None:
        """Adds a line, which ends in a line feed."""
        if self._bytes + len(line) > self._buffer_bytes:
            self._dropped.inc()
        else:
            self._lines.append(line)
            self._bytes += len(line)

    @property
    def paths(self) -> tuple[Path, Path]:
        """The file and its predecessor."""
        return self._path, Path(f"{self._path}.1")

    @property
    def waiting(self) -> Sequence[bytes]:
        """The lines that are not written yet."""
        return tuple(self._lines)

    def find_waiting(self, start: bytes) -> bytes | None:
        """The last line that begins so and is not written yet."""
        return next((line for line in reversed(self._lines) if line.startswith(start)), None)

    async def write(self) -> None:
        """Writes the lines that wait. Call it periodically. Raises OSError if that fails."""
        if self._writing is None and self._lines:
            self._writing = asyncio.ensure_future(self._write(tuple(self._lines)))
        if self._writing is not None:
            # Shielded, so that no line is written twice.
            await asyncio.shield(self._writing)
        now_s = self._clock()
        if self._age_s < inf and not 0 <= now_s - self._looked_s < _LOOK_S:
            self._looked_s = now_s
            await asyncio.to_thread(self.expire, now_s)

    def expire(self, now_s: float) -> None:
        """Deletes the predecessor if its first line is too old, and puts the file in its place if
        its own first line is half as old. It waits for the disk. Raises OSError."""
        _, earlier = self.paths
        if now_s - _begin_s(earlier) > self._age_s:
            earlier.unlink(missing_ok=True)
        if now_s - _begin_s(self._path) > self._age_s / 2:
            file = open_locked(self._path)
            try:
                if now_s - _begin_s(self._path) > self._age_s / 2:  # no other process was first
                    self._path.replace(earlier)
            finally:
                os.close(file)

    async def _write(self, lines: Sequence[bytes]) -> None:
        try:
            await asyncio.to_thread(self.append, lines)
        finally:
            self._writing = None  # before it is done: `write` would return at once for ever
        del self._lines[: len(lines)]
        self._bytes -= sum(map(len, lines))

    async def close(self) -> None:
        """Writes what waits, if that is soon."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._lines:
                    await self.write()
        if self._lines:
            log.error("%s: %s lines were lost", self._path, len(self._lines))

    def append(self, lines: Sequence[bytes]) -> None:
        """Appends lines, all or none. It waits for the disk. Raises OSError."""
        data = memoryview(b"".join(lines))
        file = self._open(len(data))
        try:
            size = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                with suppress(OSError):  # what has no size, as /dev/full
                    os.ftruncate(file, size)
                raise
        finally:
            os.close(file)

    def _open(self, more_bytes: int) -> int:
        """The file, locked, with room for so many bytes."""
        while True:
            file = open_locked(self._path)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or not found.st_size:
                return file
            if found.st_size + more_bytes <= self._file_bytes:
                return file
            try:
                self._path.replace(f"{self._path}.1")
            finally:
                os.close(file)


def _begin_s(path: Path) -> float:
    """The time of a log's first line; infinite if it has none that says it."""
    try:
        with path.open("rb") as file:
            found = TIME.search(file.read(_HEAD_BYTES))
    except FileNotFoundError:
        return inf
    return float(found[1]) if found else inf


def open_locked(path: Path) -> int:
    """Opens a file to append to it, made if there is none, and locked until it is closed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have renamed it before this one had the lock.
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


_BLOCK_BYTES = 256 * 1024
# Longer lines are not read to their end.
_MAX_LINE_BYTES = 64 * 1024


class SearchTooLong(Exception):
    """The time is over, and the line was not found."""


def lines_backwards(paths: Sequence[Path]) -> Iterator[bytes]:
    """The whole lines of the files, the last one of the first file first. It opens all files at
    once, so that none is renamed between two. A line that is too long ends its file."""
    with ExitStack() as stack:
        files = []
        for path in paths:
            with suppress(FileNotFoundError):
                files.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                stack.callback(os.close, files[-1])
        for file in files:
            end, rest, is_first = os.fstat(file).st_size, b"", True
            while end > 0 and len(rest) <= _MAX_LINE_BYTES:
                begin = max(end - _BLOCK_BYTES, 0)
                rest, *lines = (os.pread(file, end - begin, begin) + rest).split(b"\n")
                if lines and is_first:  # what follows the last line feed may not be written yet
                    del lines[-1]
                    is_first = False
                yield from reversed(lines)
                end = begin
            if end == 0 and rest and not is_first:
                yield rest


def find_last_line(
    paths: Sequence[Path], start: bytes, deadline_s: float, clock: Callable[[], float]
) -> bytes | None:
    """The last line that begins with `start` in the first of these files that has one; None if none
    has. Raises SearchTooLong."""
    with ExitStack() as stack:
        files = []
        for path in paths:  # open before the search, so that no file is renamed between two
            with suppress(FileNotFoundError):
                files.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                stack.callback(os.close, files[-1])
        for file in files:
            if (line := _find_in(file, start, deadline_s, clock)) is not None:
                return line
    return None


def _find_in(
    file: int, start: bytes, deadline_s: float, clock: Callable[[], float]
) -> bytes | None:
    mark, next_bytes, end = b"\n" + start, b"", os.fstat(file).st_size
    while end > 0:
        if clock() > deadline_s:
            raise SearchTooLong
        begin = max(end - _BLOCK_BYTES, 0)
        block = os.pread(file, end - begin, begin)
        text = block + next_bytes
        if (found := text.rfind(mark)) >= 0:
            return _line_at(file, begin + found + 1)
        if not begin and text.startswith(start):
            return _line_at(file, 0)
        next_bytes, end = text[: len(mark) - 1], begin
    return None


def _line_at(file: int, offset: int) -> bytes | None:
    """The line there; None if it is not complete."""
    line, is_whole, _ = os.pread(file, _MAX_LINE_BYTES, offset).partition(b"\n")
    return line if is_whole else None


LINES_PER_CAUSE = 3
"""The most lines of one cause between two sweeps."""
_MOST_CAUSES = 100
_OTHERS = "other causes"
_LONGEST = 300


class SampledLog:
    """The lines since the last sweep, by their message and cause."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def add(self, level: int, message: str, cause: str, **fields: object) -> None:
        """Logs a line, or counts it. message: a constant."""
        if len(self._seen) >= _MOST_CAUSES and (message, cause) not in self._seen:
            cause = _OTHERS
        self._seen[message, cause] += 1
        if self._seen[message, cause] <= LINES_PER_CAUSE:
            shown = {
                name: value[:_LONGEST] if isinstance(value, str) else value
                for name, value in fields.items()
            }
            log.log(level, message, extra={"cause": cause[:_LONGEST], **shown})

    def sweep(self) -> None:
        """Logs how many lines were left out since the last call. Call it once a second."""
        for (message, cause), count in self._seen.items():
            if count > LINES_PER_CAUSE:
                extra = {"cause": cause[:_LONGEST], "left_out": count - LINES_PER_CAUSE}
                log.warning("%s: more of them", message, extra=extra)
        self._seen.clear()


class KeysInForce(Protocol):
    """The API key file, as it is read again and again."""

    keys: KeyFile


def tenant_label(tenants: Tenants, key_file: KeysInForce | None, tenant: str) -> str | None:
    """A tenant's label in metrics: clients may name tenants, but only the operator adds labels."""
    in_keys = tenants.weights if key_file is None else key_file.keys.tenants
    if not in_keys and not tenants.weights:
        return None
    return tenant if tenant in in_keys or tenant in tenants.weights else "other"


MOST_REMEMBERED = 1024
# What `count` does not see: it is for complete answers.
_LOST = (Outcome.REJECTED, Outcome.FAILED, Outcome.CUT)
_BAD_REQUEST = 400
# How long a search of the files may take.
_SEARCH_S = 5.0


class RequestLog:
    """Counts every answered request, and keeps what became of each request.

    lines: the log's.
    shared: lines in place of the log's, for the other processes.
    activity: gets those that an engine's scheduler ran.
    tenant_label: a tenant as a metric's label; None if its requests are not counted by tenant.
    detector: compares prompts; its findings are summed here, once their requests are answered.
    """

    def __init__(
        self,
        metrics: Metrics,
        activity: Activity,
        lines: LineFile | None,
        detector: Detector | None = None,
        tenant_label: Callable[[str], str | None] = lambda tenant: None,
        shared: LineFile | None = None,
    ) -> None:
        self._metrics = metrics
        self._activity = activity
        self._lines = lines
        self.detector = detector
        # What a new version of a client breaks is an event of the node.
        self.add_event: Callable[[str, str, str], object] = lambda kind, subject, text: None
        self._tenant_label = tenant_label
        self._shared = shared
        self._remembered: deque[EndedRequest] = deque(maxlen=MOST_REMEMBERED)
        self._unshared = 0
        self._searches = asyncio.Lock()
        if lines is None:
            size = self._remembered.__len__
            metrics.tables.add("remembered_requests", size, lambda: MOST_REMEMBERED)

    def keep(self, ended: EndedRequest, session: int | None = None) -> None:
        """Keeps what became of a request. session: the number of its conversation."""
        if session is not None and ended.outcome in _LOST:
            about = ended.worker or "", ended.prompt_tokens, ended.facts, ended.session
            self._activity.add_error(ended.time_s, ended.tenant, session, *about)
        if ended.outcome is not Outcome.COMPLETE or not _is_ok(ended):
            reason = reason_of(ended.status, ended.outcome, ended.error)
            if reason is not None:
                counted = self._activity.failures.add(ended.time_s, reason)
                self._metrics.failed_requests.counts[(counted,)] += 1
        if self._lines is not None:
            self._lines.add(as_line(ended))
        else:
            self._remembered.append(ended)
            self._unshared += 1

    async def write(self) -> None:
        """Writes what waits. Call it periodically. Raises OSError if that fails."""
        if self._shared is not None:
            new = min(self._unshared, MOST_REMEMBERED)
            self._unshared = 0
            for ended in list(self._remembered)[len(self._remembered) - new :]:
                self._shared.add(as_line(ended))
        for lines in (self._lines, self._shared):
            if lines is not None:
                await lines.write()

    def change(self, limit_bytes: int, age_s: float) -> None:
        """Changes the largest size and the longest age of the log."""
        if self._lines is not None:
            self._lines.change(limit_bytes, age_s)

    async def search(self, search: Search) -> dict[str, Any]:
        """What a search finds, among the lines of all processes but those of others that are not
        written yet. Raises OSError."""
        lines = self._lines or self._shared
        waiting = () if lines is None else lines.waiting
        kept = len(self._remembered) if lines is None else self._unshared
        remembered = list(self._remembered)[max(len(self._remembered) - kept, 0) :]
        now = chain(map(as_line, reversed(remembered)), reversed(waiting))
        paths = () if lines is None else lines.paths
        async with self._searches:  # one at a time
            deadline_s = time.monotonic() + _SEARCH_S
            # What waits may be in the file by now.
            known = {line.removesuffix(b"\n") for line in waiting}
            written = (line for line in lines_backwards(paths) if line not in known)
            return await asyncio.to_thread(
                search.run, chain(now, written), deadline_s, time.monotonic
            )

    async def close(self) -> None:
        """Writes what waits, if that is soon."""
        if self._lines is not None:
            await self._lines.close()

    async def find(self, request_id: str) -> bytes | None:
        """The line of the latest request with this id; None if there is none. What other processes
        have kept within the last second is not found. Raises SearchTooLong or OSError."""
        for ended in reversed(self._remembered):
            if ended.request_id == request_id:
                return as_line(ended)
        lines = self._lines or self._shared
        if lines is None:
            return None
        start = start_of_line(request_id)
        if (waiting := lines.find_waiting(start)) is not None:
            return waiting
        async with self._searches:  # one at a time
            deadline_s = time.monotonic() + _SEARCH_S
            return await asyncio.to_thread(
                find_last_line, lines.paths, start, deadline_s, time.monotonic
            )

    def count(self, ended: EndedRequest, attempt: Attempt, *, streams: bool) -> None:
        """Counts a request whose response is complete; `attempt` was its last.

        streams: whether the response is a stream of events.
        """
        metrics, usage, routing = self._metrics, ended.usage, attempt.routing
        worker, prompt_tokens = attempt.worker.id, routing.prompt_tokens
        metrics.request_s.observe(ended.route, ended.total_s)
        if usage is not None and usage.cached_tokens is not None:
            error_tokens = abs(attempt.predicted_tokens - usage.cached_tokens)
            metrics.prompt_tokens.counts[(worker,)] += usage.prompt_tokens or prompt_tokens
            metrics.predicted_tokens.counts[(worker,)] += attempt.predicted_tokens
            metrics.reported_tokens.counts[(worker,)] += usage.cached_tokens
            metrics.prediction_error_tokens.observe(worker, error_tokens)
        if routing.runs:
            self._count_tokens(ended, worker, streams=streams)
            self._activity.add(
                ended.time_s,
                routing.tenant,
                routing.session,
                worker,
                prompt_tokens,
                usage,
                ended.ttft_s if _is_ok(ended) else None,
                ended.facts,
                ended.session,
            )
            metrics.clients.count(ended.facts, prompt_tokens, usage)
        if ended.diagnosis is not None:
            self._add_finding(ended.diagnosis, prompt_tokens)

    def _count_tokens(self, ended: EndedRequest, worker: str, *, streams: bool) -> None:
        """Counts the output of a request that generates, and what its tenant used."""
        metrics, usage = self._metrics, ended.usage
        output_tokens = None if usage is None else usage.output_tokens
        if output_tokens is not None:
            metrics.output_tokens.counts[(worker,)] += output_tokens
            if streams and output_tokens > 1:
                between_s = (ended.total_s - ended.ttft_s) / (output_tokens - 1)
                metrics.between_tokens_s.observe(ended.route, between_s)
        elif _is_ok(ended):
            metrics.answers_without_usage.counts[(ended.route,)] += 1
        if (tenant := self._tenant_label(ended.tenant)) is not None:
            metrics.tenant_ttft_s.observe(tenant, ended.ttft_s)
            if usage is not None:
                prompt_tokens = usage.prompt_tokens or ended.prompt_tokens
                metrics.tenant_prompt_tokens.counts[(tenant,)] += prompt_tokens
                metrics.tenant_cached_tokens.counts[(tenant,)] += usage.cached_tokens or 0
                metrics.tenant_output_tokens.counts[(tenant,)] += output_tokens or 0

    def _add_finding(self, found: PromptDiagnosis, prompt_tokens: int) -> None:
        assert self.detector is not None, "a prompt was compared"
        divergence = found.divergence
        self.detector.findings.add(found.harness, found.model, prompt_tokens, divergence)
        if divergence is not None:
            kind, tokens = divergence["kind"], divergence["tokens"]
            if divergence["scope"] == VERSION:
                kind = NEW_VERSION
                said = version_sentence(found.harness, divergence)
                log.warning("%s", said)
                self.add_event("client version", f"{found.harness} {divergence['version']}", said)
            self._metrics.diverged_prompts.counts[found.harness, kind] += 1
            self._metrics.diverged_tokens.counts[found.harness, kind] += tokens


def _is_ok(ended: EndedRequest) -> bool:
    return ended.status is not None and ended.status < _BAD_REQUEST
