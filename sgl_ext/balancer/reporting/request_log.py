"""Counts every answered request, and keeps what became of each request, answered or not.

With `--request-log FILE` that is a line of a file (`ended_request.py`), which all processes of a
balancer share. Without it the latest requests are remembered: by each process itself, and for
the others in a small file in the folder that they share.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.activity import Activity
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector, PromptDiagnosis
from sgl_ext.balancer.reporting.ended_request import EndedRequest, as_line, start_of_line
from sgl_ext.balancer.reporting.line_file import LineFile
from sgl_ext.balancer.reporting.line_search import find_last_line
from sgl_ext.balancer.routing.attempts import Attempt

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
