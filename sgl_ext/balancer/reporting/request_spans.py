"""The spans of one request, for OpenTelemetry. No OpenTelemetry is imported here.

    request              from the first byte of its head's turn to its end
      read               its body is parsed
      queue              it waits for capacity, or for a prefix that another request computes
      place              an engine is chosen
      upstream           an attempt; the engine's own spans are children of this one
        first token      from the sent request to the first byte that the client gets

Attributes are those of OpenTelemetry's conventions for HTTP and generative AI where there are
any, and begin with `sgl_ext.` otherwise. No text of a prompt is among them.
"""

import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.reporting.ended_request import EndedRequest, Outcome
from sgl_ext.balancer.routing.attempts import Attempt
from sgl_ext.protocols.request_ids import TraceContext, new_span_id

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
        """It is to be placed."""
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
