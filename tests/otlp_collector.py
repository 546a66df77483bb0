"""An OTLP collector in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What a collector was sent.

    bodies: the requests as they came. gate: it answers nothing while this is not set.
    """

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_asked = threading.Event()

    def named(self, name: str) -> Any:
        """The one span of this name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.is_asked.set()
            collector.gate.wait(60)
            collector.bodies.append(body)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                collector.resources.append(values(group.resource.attributes))
                for scope in group.scope_spans:
                    collector.spans += scope.spans
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        yield collector
    finally:
        collector.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """A span's or a resource's attributes."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
