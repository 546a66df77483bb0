"""What the balancer counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from sgl_ext.balancer.tally import Spread, Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Metrics:
    """The balancer's own metrics; one registry each, so that tests do not share counts."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Tally("sgl_ext_requests", "Requests answered", ["path", "status"], registry)
        self.first_byte_s = Spread(
            "sgl_ext_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            "path",
            _SECONDS,
            registry,
        )
        self.retries = Counter(
            "sgl_ext_retries", "Requests sent again to another worker", registry=registry
        )
        self.cut_streams = Counter(
            "sgl_ext_cut_streams",
            "Streams that a worker cut after the first byte",
            registry=registry,
        )
        self.client_gone = Counter(
            "sgl_ext_client_gone", "Requests whose client left before the end", registry=registry
        )
        self.headers_read = Counter(
            "sgl_ext_headers_read",
            "Session headers seen at the head of a prompt",
            registry=registry,
        )
        self.worker_ready = Gauge(
            "sgl_ext_worker_ready", "1 if the worker takes requests", ["worker"], registry=registry
        )
        self.worker_in_flight = Gauge(
            "sgl_ext_worker_in_flight", "Requests a worker carries", ["worker"], registry=registry
        )

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
