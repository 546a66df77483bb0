"""Exports the spans of requests to a collector, over OTLP (HTTP with protobuf), by a thread.

Spans wait in a bounded queue. What does not fit, and what the collector does not take in time, is
dropped and counted, so a collector that hangs costs no request anything. OpenTelemetry is an
extra, imported with the first export and not without a collector.
"""

import asyncio
import importlib.util
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.ended_request import EndedRequest
from sgl_ext.balancer.reporting.request_spans import RequestSpans, Span
from sgl_ext.settings.schema import BalancerSettings, SettingsError

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
