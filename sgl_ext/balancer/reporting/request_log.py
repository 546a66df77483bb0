"""What became of each request: the prediction checked against the engine's own word, and a log.

With `--request-log FILE` every request that an engine answered is a line of JSON:

    {"time", "route", "status", "worker", "reason", "tenant", "harness", "model", "session",
     "prefix_hash", "tools_hash", "tools_count", "segments", "prompt_tokens",
     "predicted_tokens", "expected_tokens", "reported_tokens", "queue_ms", "ttft_ms",
     "total_ms", "attempts", "divergence"}

`predicted_tokens` of the prompt were known to be cached, `expected_tokens` counts those that
another request was still computing as well. `prefix_hash` is equal for prompts of a tenant and
a model with the same tools and instructions in the same order, `tools_hash` for those with the
same tools; both are null where there are none. `divergence` is null, or says where the prompt
does not begin as an earlier one (docs/doctor.md).

`session` and the others are hashes; no word of a prompt is written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.diagnosis import Diagnosis, Seen
from sgl_ext.balancer.routing.attempt import Attempt, RoutingRequest
from sgl_ext.requests.segments import Chain
from sgl_ext.requests.usage import read_usage

_BUFFER_BYTES = 64 * 1024


class Answered(Protocol):
    """A request whose answer is complete; `seen` unless its prompt was not looked at."""

    routing: RoutingRequest
    seen: Seen | None
    first_data: bytes
    last_data: bytes
    queued_s: float

    def story(self) -> tuple[str, int, int, float, float]: ...


class Ledger:
    """Books every answered request. Call `flush` now and then, and `close` at the end.

    diagnosis: what looks at the prompts as they come; its findings are booked here.
    """

    def __init__(
        self, metrics: Metrics, log: Path | None, diagnosis: Diagnosis | None = None
    ) -> None:
        self._metrics = metrics
        self.diagnosis = diagnosis
        self._log: BinaryIO | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("ab", buffering=_BUFFER_BYTES)

    def enter(self, request: Answered, attempt: Attempt) -> None:
        """Books a request that `flight` has just brought home."""
        metrics, worker = self._metrics, attempt.worker.url
        usage = read_usage(request.first_data, request.last_data)
        reported = None if usage is None else usage.cached_tokens
        if usage is not None and reported is not None:
            metrics.prompt_tokens.counts[(worker,)] += (
                usage.prompt_tokens or request.routing.prompt_tokens
            )
            metrics.predicted_tokens.counts[(worker,)] += attempt.predicted_tokens
            metrics.reported_tokens.counts[(worker,)] += reported
            metrics.prediction_error_tokens.observe(
                worker, abs(attempt.predicted_tokens - reported)
            )
        if request.seen is not None:
            self._enter_seen(request.seen, request.routing.prompt_tokens)
        if self._log is not None:
            self._log.write(self._line(request, attempt, reported))

    def _enter_seen(self, seen: Seen, prompt_tokens: int) -> None:
        assert self.diagnosis is not None, "a prompt was seen"
        divergence = seen.divergence
        self.diagnosis.findings.add(seen.harness, seen.model, prompt_tokens, divergence)
        if divergence is not None:
            kind, tokens = divergence["kind"], divergence["tokens"]
            self._metrics.diverged_prompts.counts[seen.harness, kind] += 1
            self._metrics.diverged_tokens.counts[seen.harness, kind] += tokens

    def _line(self, request: Answered, attempt: Attempt, reported: int | None) -> bytes:
        routing, seen = request.routing, request.seen
        route, status, attempts, first_byte_s, total_s = request.story()
        record: dict[str, Any] = {
            "time": round(time.time(), 3),
            "route": route,
            "status": status,
            "worker": attempt.worker.url,
            "reason": attempt.placement.reason,
            "tenant": routing.tenant,
            "harness": None if seen is None else seen.harness,
            "model": None if seen is None else seen.model,
            "session": None if routing.session is None else f"{routing.session:032x}",
            "prefix_hash": _hash_behind(routing.chain, routing.chain.head_segments),
            "tools_hash": _hash_behind(routing.chain, routing.chain.tool_segments),
            "tools_count": routing.chain.tools,
            "segments": len(routing.chain.hashes),
            "prompt_tokens": routing.prompt_tokens,
            "predicted_tokens": attempt.predicted_tokens,
            "expected_tokens": attempt.expected_tokens,
            "reported_tokens": reported,
            "queue_ms": round(request.queued_s * 1000, 3),
            "ttft_ms": round(first_byte_s * 1000, 3),
            "total_ms": round(total_s * 1000, 3),
            "attempts": attempts,
            "divergence": None if seen is None else seen.divergence,
        }
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)

    def flush(self) -> None:
        """Puts what was written where readers see it."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _hash_behind(chain: Chain, segments: int) -> str | None:
    """The hash of everything up to the end of so many segments."""
    return f"{chain.hashes[segments - 1]:032x}" if segments else None
