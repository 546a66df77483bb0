"""The spans of one request for OpenTelemetry, and their export.

    request              from the first byte of its head's turn to its end
      read               its body is parsed
      queue              it waits for capacity, or for a prefix that another request computes
      place              an engine is chosen
      upstream           an attempt; the engine's own spans are children of this one
        first token      from the sent request to the first byte that the client gets

Attributes are those of OpenTelemetry's conventions for HTTP and generative AI where there are
any, and begin with `sgl_ext.` otherwise. No text of a prompt is among them.

A thread exports the spans to a collector, over OTLP (HTTP with protobuf). Spans wait in a bounded
queue. What does not fit, and what the collector does not take in time, is dropped and counted, so a
collector that hangs costs no request anything. OpenTelemetry is an extra, imported with the first
export and not without a collector.
"""

import asyncio
import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.request_log import EndedRequest, Outcome
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.protocols.request_ids import TraceContext, new_span_id
from sgl_ext.settings.schema import BalancerSettings, SettingsError

_MAX_MODEL_CHARS = 100
_OPERATIONS = {
    "/v1/messages": "chat",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}

Value = str | int | float | bool


class Kind(Enum):
    """The kinds of spans, by OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(NamedTuple):
    """A span that has ended. Ids are hexadecimal digits; times are of the wall clock.

    parent_id: "" for the first span of a trace. error: what went wrong, None if nothing did.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: str | None = None


class RequestSpans:
    """Collects the spans of a request whose trace is recorded; the request calls it as it goes on.

    clock: the one by which `arrived_s` was read.
    """

    def __init__(
        self,
        head: RequestHead,
        trace_id: str,
        arrived_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        stated = head.identity.trace
        self._head = head
        self._trace_id = trace_id
        self._parent_id = "" if stated is None else stated.span_id
        self._state = "" if stated is None else stated.state
        self._id = new_span_id()
        self._clock = clock
        self._base_ns = time.time_ns() - int(clock() * 1e9)
        self._arrived_s = arrived_s
        self._waits_s = 0.0
        self._upstream: tuple[str, float, dict[str, Value]] | None = None
        self._model = ""
        self._spans: list[Span] = []

    def read(self, model: object) -> None:
        """The body was read."""
        if isinstance(model, str):
            self._model = model[:_MAX_MODEL_CHARS]
        self._add("read", self._arrived_s)

    def waits(self) -> None:
        """The request begins to wait for an engine."""
        self._waits_s = self._clock()

    def placed(self, attempt: Attempt, wait_reason: str) -> None:
        """An engine was chosen. wait_reason: why it was queued, "" if it was not."""
        began_s = self._waits_s
        if wait_reason:
            self._add("queue", began_s, {"sgl_ext.wait.reason": wait_reason})
            began_s = self._clock()
        placement: dict[str, Value] = {
            "sgl_ext.engine": attempt.worker.id,
            "sgl_ext.placement.reason": attempt.placement.reason,
            "sgl_ext.prompt_tokens.estimated": attempt.routing.prompt_tokens,
            "sgl_ext.prompt_tokens.predicted_cached": attempt.predicted_tokens,
        }
        self._add("place", began_s, placement)
        self._waits_s = self._clock()

    def connects(self, wait_reason: str) -> None:
        """Its engine is connected to, now that it need not wait."""
        if wait_reason == "prefix":
            self._add("queue", self._waits_s, {"sgl_ext.wait.reason": wait_reason})

    def sent(self, url: str, attempts: int) -> TraceContext:
        """It is sent to an engine. The context for the engine's own spans."""
        self.upstream_ended("the connection broke")  # if one did, and another was opened
        parts, span_id = urlsplit(url), new_span_id()
        attributes: dict[str, Value] = {
            "http.request.method": self._head.method,
            "url.path": self._head.path,
            "server.address": parts.hostname or "",
            "server.port": parts.port or 80,
        }
        if attempts > 1:
            attributes["http.request.resend_count"] = attempts - 1
        self._upstream = span_id, self._clock(), attributes
        return TraceContext(self._trace_id, span_id, True, self._state)

    def first_byte(self) -> None:
        """The first byte goes to the client."""
        if self._upstream is not None:
            span_id, began_s, _ = self._upstream
            self._add("first token", began_s, parent_id=span_id)

    def upstream_ended(self, error: str | None = None, status: int | None = None) -> None:
        """An attempt has ended; does nothing if none runs."""
        if self._upstream is None:
            return
        (span_id, began_s, attributes), self._upstream = self._upstream, None
        if status:
            attributes["http.response.status_code"] = status
        self._add("upstream", began_s, attributes, span_id=span_id, kind=Kind.CLIENT, error=error)

    def end(self, ended: EndedRequest) -> list[Span]:
        """It has ended. All of its spans."""
        error = None
        if ended.outcome is not Outcome.COMPLETE or (ended.status or 0) >= 500:
            error = ended.error or f"{ended.outcome}: status {ended.status}"
        self.upstream_ended(error, ended.status if ended.outcome is Outcome.COMPLETE else None)
        usage = ended.usage
        attributes: dict[str, Value | None] = {
            "http.request.method": self._head.method,
            "http.route": ended.route,
            "url.path": self._head.path,
            "http.response.status_code": ended.status,
            "error.type": None if error is None else str(ended.status or ended.outcome),
            "gen_ai.provider.name": "sglang",
            "gen_ai.operation.name": _OPERATIONS.get(ended.route),
            "gen_ai.request.model": self._model or None,
            "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": None if usage is None else usage.cached_tokens,
            "gen_ai.usage.output_tokens": None if usage is None else usage.output_tokens,
            "sgl_ext.request.id": ended.request_id,
            "sgl_ext.outcome": ended.outcome.value,
            "sgl_ext.tenant": ended.tenant or None,
            "sgl_ext.session": ended.session,
            "sgl_ext.attempts": ended.attempts,
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        name = f"{self._head.method} {ended.route}"
        about = {"span_id": self._id, "parent_id": self._parent_id, "kind": Kind.SERVER}
        self._add(name, self._arrived_s, known, error=error, **about)  # type: ignore[arg-type]
        return self._spans

    def _add(
        self,
        name: str,
        began_s: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        span_id: str = "",
        parent_id: str | None = None,
        kind: Kind = Kind.INTERNAL,
        error: str | None = None,
    ) -> None:
        """Adds a span that ends now."""
        self._spans.append(
            Span(
                self._trace_id,
                span_id or new_span_id(),
                self._id if parent_id is None else parent_id,
                name,
                kind,
                self._base_ns + int(began_s * 1e9),
                self._base_ns + int(self._clock() * 1e9),
                attributes or {},
                error,
            )
        )


log = logging.getLogger(__name__)

MOST_WAITING = 4096
_BATCH = 512
_EVERY_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_S = 1.0
_PATH = "/v1/traces"
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_ALL_IDS = 1 << 64


class Exporter(Protocol):
    """Sends spans. It may block for as long as its own timeout."""

    def export(self, spans: list[Span]) -> bool:
        """Whether the collector took them."""

    def shutdown(self) -> None:
        """Ends an export that runs, as far as it can."""


class SpanExport:
    """The queue of spans, and the thread that exports them. Use it in the event loop alone.

    share: how many of the traces that begin here are recorded.
    """

    def __init__(self, make: Callable[[], Exporter], metrics: Metrics, share: float) -> None:
        self._make = make
        self._metrics = metrics
        self._least_id = _ALL_IDS - int(share * _ALL_IDS)
        self._waiting: deque[Span] = deque()
        self._loop = asyncio.get_running_loop()
        self._exporter: Exporter | None = None
        self._has_failed = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()
        metrics.tables.add("waiting_spans", self._waiting.__len__, lambda: MOST_WAITING)

    def records(self, spans_trace_id: str, is_sampled: bool | None) -> bool:
        """Whether a trace is recorded. is_sampled: what its client decided, None without one."""
        if is_sampled is not None:
            return is_sampled
        return int(spans_trace_id[16:], 16) >= self._least_id

    def add(self, spans: RequestSpans, ended: EndedRequest) -> None:
        """Adds a request's spans, all or none."""
        made = spans.end(ended)
        if len(self._waiting) + len(made) > MOST_WAITING:
            self._count("dropped", len(made))
        else:
            self._waiting.extend(made)

    async def close(self) -> None:
        """Exports what waits, if that is soon."""
        self._ends.set()
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        if self._thread.is_alive() and self._exporter is not None:
            self._exporter.shutdown()

    def _count(self, result: str, spans: int) -> None:
        self._metrics.spans.counts[(result,)] += spans

    def _run(self) -> None:
        """The thread. Only the loop counts, so that it needs no locks."""
        is_last = False
        while not is_last:
            is_last = self._ends.wait(_EVERY_S)
            while batch := self._take():
                result = "exported" if self._export(batch) else "failed"
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._count, result, len(batch))

    def _take(self) -> list[Span]:
        batch: list[Span] = []
        with suppress(IndexError):
            while len(batch) < _BATCH:
                batch.append(self._waiting.popleft())
        return batch

    def _export(self, batch: list[Span]) -> bool:
        """Whether the collector took a batch. An outage is logged at its beginning and end."""
        reason = "it does not take them"
        try:
            if self._exporter is None:
                self._exporter = self._make()
            is_taken = self._exporter.export(batch)
        except Exception as error:
            is_taken, reason = False, f"{type(error).__name__}: {error}"
        if is_taken == self._has_failed:
            self._has_failed = not is_taken
            if is_taken:
                log.info("the collector takes spans again")
            else:
                log.warning("spans are dropped until the collector takes them: %s", reason)
        return is_taken


class OtlpExporter:
    """OpenTelemetry's exporter. It reads OpenTelemetry's own variables, too."""

    def __init__(self, endpoint: str | None) -> None:
        """endpoint: None for that of the variables."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource

        # `SpanExport` logs outages, and not each failure.
        for name in ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.exporter.http"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        ours = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "sgl-ext"}
        self._resource = Resource.create(ours)
        self._otlp = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)

    def export(self, spans: list[Span]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        made = list(_readable(spans, self._resource))
        return bool(self._otlp.export(made) is SpanExportResult.SUCCESS)

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


def _readable(spans: Iterable[Span], resource: Any) -> Iterable[Any]:
    """The spans as OpenTelemetry's."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    scope, sampled = InstrumentationScope("sgl_ext"), TraceFlags(TraceFlags.SAMPLED)
    for span in spans:
        trace_id, parent = int(span.trace_id, 16), None
        if span.parent_id:
            parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=False)
        status = Status() if span.error is None else Status(StatusCode.ERROR, span.error)
        yield ReadableSpan(
            span.name,
            SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=sampled),
            parent,
            resource,
            span.attributes,
            kind=SpanKind[span.kind.value],
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )


def check_export(config: BalancerSettings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether spans are exported: by the settings, or by OpenTelemetry's variables if its packages
    are there. Raises SettingsError if the settings name a collector without them."""
    named = config.otlp_endpoint
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if named is None and (is_off or not any(environ.get(name) for name in _VARIABLES)):
        return False
    if all(map(_is_installed, _PACKAGES)):
        return True
    needed = "needs OpenTelemetry: pip install 'sgl-ext[otel]'"
    if named is None:
        log.warning("no spans are exported: %s names a collector, which %s", _VARIABLES[1], needed)
        return False
    raise SettingsError(f"otlp-endpoint={named!r}: {needed}")


def open_export(config: BalancerSettings, metrics: Metrics) -> SpanExport | None:
    """The export of the settings; None if they name no collector. As `check_export`."""
    if not check_export(config):
        return None
    endpoint = config.otlp_endpoint
    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _PATH
    return SpanExport(lambda: OtlpExporter(endpoint), metrics, config.trace_share)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
