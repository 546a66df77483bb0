"""What became of each request: the prediction checked against the engine's own word, and a log.

With `--request-log FILE` every request that an engine answered is a line of JSON:

    {"time", "route", "status", "worker", "reason", "prefix", "session", "segments", "tools",
     "prompt_tokens", "predicted_tokens", "expected_tokens", "reported_tokens", "queue_ms",
     "ttft_ms", "total_ms", "attempts"}

`predicted_tokens` of the prompt were known to be cached, `expected_tokens` counts those that
another request was still computing as well.

`prefix` and `session` are hashes; no word of a prompt is written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO, Protocol

import orjson

from sgl_ext.balancer.flight import Asked, Flight
from sgl_ext.balancer.metrics import Metrics
from sgl_ext.requests.usage import cached_tokens

_BUFFER_BYTES = 64 * 1024


class Answered(Protocol):
    """A request whose answer is complete."""

    asked: Asked
    first_data: bytes
    last_data: bytes
    queued_s: float

    def story(self) -> tuple[str, int, int, float, float]: ...


class Ledger:
    """Books every answered request. Call `flush` now and then, and `close` at the end."""

    def __init__(self, metrics: Metrics, log: Path | None) -> None:
        self._metrics = metrics
        self._log: BinaryIO | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("ab", buffering=_BUFFER_BYTES)

    def enter(self, request: Answered, flight: Flight) -> None:
        """Books a request that `flight` has just brought home."""
        metrics, worker = self._metrics, flight.worker.url
        reported = cached_tokens(request.last_data)
        if reported is None and request.first_data is not request.last_data:
            reported = cached_tokens(request.first_data)
        if reported is not None:
            metrics.predicted_tokens.counts[(worker,)] += flight.predicted_tokens
            metrics.reported_tokens.counts[(worker,)] += reported
            metrics.prediction_error_tokens.add(worker, abs(flight.predicted_tokens - reported))
        if self._log is not None:
            self._log.write(self._line(request, flight, reported))

    def _line(self, request: Answered, flight: Flight, reported: int | None) -> bytes:
        asked = request.asked
        route, status, attempts, first_byte_s, total_s = request.story()
        record = {
            "time": round(time.time(), 3),
            "route": route,
            "status": status,
            "worker": flight.worker.url,
            "reason": flight.placement.reason,
            "prefix": f"{asked.prefix:032x}",
            "session": None if asked.session is None else f"{asked.session:032x}",
            "segments": len(asked.chain.hashes),
            "tools": asked.chain.tools,
            "prompt_tokens": asked.prompt_tokens,
            "predicted_tokens": flight.predicted_tokens,
            "expected_tokens": flight.expected_tokens,
            "reported_tokens": reported,
            "queue_ms": round(request.queued_s * 1000, 3),
            "ttft_ms": round(first_byte_s * 1000, 3),
            "total_ms": round(total_s * 1000, 3),
            "attempts": attempts,
        }
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)

    def flush(self) -> None:
        """Puts what was written where readers see it."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
