"""Counts every answered request, and keeps what became of each request, answered or not.

With `--request-log FILE` that is a line of a file (`ended_request.py`), which all processes of a
balancer share. Without it the latest requests are remembered: by each process itself, and for
the others in a small file in the folder that they share.

A `LineFile` is written by a thread: adding a line never waits. Lines wait in memory, within a
bound, until they are written; a write that failed is made again. What exceeds the bound is dropped
and counted. When the file would grow beyond half of its limit, it becomes FILE.1, in place of the
one before, and a new file begins.

A search reads the files backwards, as those who look for a request mostly look for a late one.
Blocks are small, so that a search in a thread leaves the interpreter to others between them.
"""

import asyncio
import fcntl
import logging
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.activity import Activity
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector, PromptDiagnosis
from sgl_ext.balancer.reporting.ended_request import EndedRequest, as_line, start_of_line
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.settings.schema import SettingsError

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
_CLOSE_S = 2.0


def check_file(path: str) -> None:
    """Makes the file. Raises SettingsError if it cannot be written."""
    try:
        os.close(open_locked(Path(path)))
    except OSError as error:
        raise SettingsError(f"request_log={path!r}: {error.strerror}") from None


class LineFile:
    """The lines of one process. Those that were lost are counted.

    limit_bytes: the largest size of the file and its predecessor together.
    """

    def __init__(self, path: Path, limit_bytes: int, metrics: Metrics) -> None:
        self._path = path
        self.change_limit(limit_bytes)
        self._dropped = metrics.request_log_dropped_lines
        self._lines: list[bytes] = []
        self._bytes = 0
        size, limit = (lambda: self._bytes), (lambda: self._buffer_bytes)
        metrics.tables.add("request_log_lines", size, limit, "bytes")
        self._writing: asyncio.Future[None] | None = None

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the largest size. A file that is larger is replaced at its next write."""
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


MOST_REMEMBERED = 1024
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
        detector: DivergenceDetector | None = None,
        tenant_label: Callable[[str], str | None] = lambda tenant: None,
        shared: LineFile | None = None,
    ) -> None:
        self._metrics = metrics
        self._activity = activity
        self._lines = lines
        self.detector = detector
        self._tenant_label = tenant_label
        self._shared = shared
        self._remembered: deque[EndedRequest] = deque(maxlen=MOST_REMEMBERED)
        self._unshared = 0
        self._searches = asyncio.Lock()
        if lines is None:
            size = self._remembered.__len__
            metrics.tables.add("remembered_requests", size, lambda: MOST_REMEMBERED)

    def keep(self, ended: EndedRequest) -> None:
        """Keeps what became of a request."""
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

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the largest size of the log."""
        if self._lines is not None:
            self._lines.change_limit(limit_bytes)

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
            self._activity.add(
                ended.time_s,
                routing.tenant,
                routing.session,
                worker,
                prompt_tokens,
                usage,
                ended.ttft_s if _is_ok(ended) else None,
                ended.facts,
                routing.session_name,
            )
            metrics.clients.count(ended.facts, prompt_tokens, usage)
            self._count_tokens(ended, worker, streams=streams)
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
            self._metrics.diverged_prompts.counts[found.harness, kind] += 1
            self._metrics.diverged_tokens.counts[found.harness, kind] += tokens


def _is_ok(ended: EndedRequest) -> bool:
    return ended.status is not None and ended.status < _BAD_REQUEST
