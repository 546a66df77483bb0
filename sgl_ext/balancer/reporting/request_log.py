"""The request log, and the comparison of predicted with reported cached tokens.

With `--request-log FILE` every request that an engine answered is a line of JSON:

    {"time", "route", "status", "worker", "reason", "tenant", "harness", "model", "session",
     "prefix_hash", "tools_hash", "tools_count", "segments", "prompt_tokens",
     "predicted_tokens", "expected_tokens", "reported_tokens", "queue_ms", "ttft_ms",
     "total_ms", "attempts", "divergence"}

`predicted_tokens` counts the prompt tokens that the engine was known to have cached.
`expected_tokens` adds those that another request was still computing there. `prefix_hash` is
equal for prompts of a tenant and a model that have the same tools and instructions in the same
order, `tools_hash` for those with the same tools; both are null if there are none. `divergence`
is null unless the prompt diverges from an earlier one (docs/doctor.md).

Sessions and prefixes are hashes. No text of a prompt is written.
"""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.activity import Activity
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector, PromptDiagnosis
from sgl_ext.balancer.reporting.line_file import LineFile
from sgl_ext.balancer.routing.attempts import Attempt
from sgl_ext.requests.segments import Chain
from sgl_ext.requests.usage import Usage


class AnsweredRequest(NamedTuple):
    """A request whose response is complete; `attempt` was its last.

    streams: whether the response is a stream of events.
    """

    attempt: Attempt
    route: str
    status: int
    attempts: int
    queued_s: float
    ttft_s: float
    total_s: float
    usage: Usage | None
    diagnosis: PromptDiagnosis | None
    streams: bool


class RequestLog:
    """Counts every answered request and adds it to the log's lines.

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
    ) -> None:
        self._metrics = metrics
        self._activity = activity
        self._lines = lines
        self.detector = detector
        self._tenant_label = tenant_label

    def record(self, request: AnsweredRequest) -> None:
        """Counts a request and adds its line."""
        metrics, attempt, usage = self._metrics, request.attempt, request.usage
        worker, prompt_tokens = attempt.worker.id, attempt.routing.prompt_tokens
        metrics.request_s.observe(request.route, request.total_s)
        if usage is not None and usage.cached_tokens is not None:
            error_tokens = abs(attempt.predicted_tokens - usage.cached_tokens)
            metrics.prompt_tokens.counts[(worker,)] += usage.prompt_tokens or prompt_tokens
            metrics.predicted_tokens.counts[(worker,)] += attempt.predicted_tokens
            metrics.reported_tokens.counts[(worker,)] += usage.cached_tokens
            metrics.prediction_error_tokens.observe(worker, error_tokens)
        if attempt.routing.runs:
            self._activity.add(
                time.time(),
                attempt.routing.tenant,
                attempt.routing.session,
                worker,
                prompt_tokens,
                usage,
                request.ttft_s if request.status < HTTPStatus.BAD_REQUEST else None,
            )
            self._count_tokens(request)
        if request.diagnosis is not None:
            self._add_finding(request.diagnosis, prompt_tokens)
        if self._lines is not None:
            self._lines.add(_line(request))

    def _count_tokens(self, request: AnsweredRequest) -> None:
        """Counts the output of a request that generates, and what its tenant used."""
        metrics, usage, routing = self._metrics, request.usage, request.attempt.routing
        output_tokens = None if usage is None else usage.output_tokens
        if output_tokens is not None:
            metrics.output_tokens.counts[(request.attempt.worker.id,)] += output_tokens
            if request.streams and output_tokens > 1:
                between_s = (request.total_s - request.ttft_s) / (output_tokens - 1)
                metrics.between_tokens_s.observe(request.route, between_s)
        elif request.status < HTTPStatus.BAD_REQUEST:
            metrics.answers_without_usage.counts[(request.route,)] += 1
        if (tenant := self._tenant_label(routing.tenant)) is not None:
            metrics.tenant_ttft_s.observe(tenant, request.ttft_s)
            if usage is not None:
                prompt_tokens = usage.prompt_tokens or routing.prompt_tokens
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


def _line(request: AnsweredRequest) -> bytes:
    attempt, routing, found = request.attempt, request.attempt.routing, request.diagnosis
    record: dict[str, Any] = {
        "time": round(time.time(), 3),
        "route": request.route,
        "status": request.status,
        "worker": attempt.worker.id,
        "reason": attempt.placement.reason,
        "tenant": routing.tenant,
        "harness": None if found is None else found.harness,
        "model": None if found is None else found.model,
        "session": None if routing.session is None else f"{routing.session:032x}",
        "prefix_hash": _hash_at(routing.chain, routing.chain.head_segments),
        "tools_hash": _hash_at(routing.chain, routing.chain.tool_segments),
        "tools_count": routing.chain.tools,
        "segments": len(routing.chain.hashes),
        "prompt_tokens": routing.prompt_tokens,
        "predicted_tokens": attempt.predicted_tokens,
        "expected_tokens": attempt.expected_tokens,
        "reported_tokens": None if request.usage is None else request.usage.cached_tokens,
        "queue_ms": round(request.queued_s * 1000, 3),
        "ttft_ms": round(request.ttft_s * 1000, 3),
        "total_ms": round(request.total_s * 1000, 3),
        "attempts": request.attempts,
        "divergence": None if found is None else found.divergence,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _hash_at(chain: Chain, segments: int) -> str | None:
    """The hash of the first `segments` segments."""
    return f"{chain.hashes[segments - 1]:032x}" if segments else None
