"""A node that answers the command's requests as its test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIVE = "/sgl_ext/live"


class Refused(Exception):
    """Given as an answer: a status with a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeNode:
    """answers: by "METHOD PATH", a document, the answer's bytes, or a function of the request's
    document.

    asked: each request's "METHOD PATH?QUERY" and document. keys: what it got as keys.
    live: the documents of each stream, which ends after them.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.live: Callable[[], Iterator[Any]] = lambda: iter(())
        self.url = ""

    def answer(self, method: str, target: str, body: bytes) -> Any:
        path = target.partition("?")[0]
        document = json.loads(body) if body else None
        self.asked.append((f"{method} {target}", document))
        found = self.answers.get(f"{method} {path}")
        if found is None:
            raise Refused(404, f"{method} {path}: Not Found")
        if isinstance(found, Exception):
            raise found
        return found(document) if callable(found) else found


@contextmanager
def fake_node(port: int = 0) -> Iterator[FakeNode]:
    """A fake node, listening on loopback."""
    node = FakeNode()

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            node.keys.append(self.headers.get("authorization"))
            if self.path == LIVE:
                self._send(200, None)
                for document in node.live():
                    self.wfile.write(b"event: state\ndata: %b\n\n" % json.dumps(document).encode())
                return
            try:
                self._send(200, node.answer(self.command, self.path, body))
            except Refused as refused:
                self._send(refused.status, {"error": {"message": str(refused)}})

        def _send(self, status: int, document: Any) -> None:
            text = document if isinstance(document, bytes) else json.dumps(document).encode()
            text = b"" if document is None else text
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = handle_one

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    node.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield node
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def state_of(**changed: Any) -> dict[str, Any]:
    """The state of a busy node."""
    kv = {"used_tokens": 12_000, "pinned_tokens": 2_000, "free_tokens": 50_000}
    engine = {
        "id": "engine-0@box:30000",
        "url": "http://127.0.0.1:30001",
        "state": "ready",
        "stage": None,
        "progress": None,
        "running": 3,
        "waiting": 1,
        "in_flight": 4,
        "kv": kv | {"total_tokens": 62_000},
        "hit_rate": 0.941,
    }
    loading = {"id": "engine-1@box:30000", "state": "starting", "stage": "loading weights"}
    unknown = dict.fromkeys(("running", "waiting", "kv", "hit_rate"))
    session = {
        "id": "0f3c",
        "tenant": "alice",
        "engine": "engine-0@box:30000",
        "turns": 12,
        "prompt_tokens": 51_200,
        "cached_share": 0.98,
        "last_s": 4656.8,
        "harness": "claude-code",
        "class": "subagent",
        "agent": "Explore",
        "harness_session": "8d1f",
    }
    pin = {
        "prefix": "d9b8" * 8,
        "tokens": 599,
        "ttl_s": 3600.0,
        "left_s": 3599.4,
        "hits": 2,
        "owner": "alice",
        "session": "s1",
        "worker": "engine-0@box:30000",
    }
    rates = [0.5, None, 0.75, 0.9]
    return {
        "version": {"sgl_ext": "0.1.0", "commit": "0123456789ab", "sglang": "0.5.23"},
        "node": {
            "status": "ok",
            "started_s": 1000.0,
            "now_s": 4661.0,
            "saved_bytes": 1_500_000,
            "in_flight": 4,
            "model": "tiny",
        },
        "engines": [engine, engine | unknown | loading | {"in_flight": 0, "progress": 0.42}],
        "queue": {"limit": 1024, "waiting": 3, "by_priority": [{"priority": 10, "waiting": 3}]},
        "recent": {
            "span_s": 60.0,
            "hit_rate": 0.9,
            "ttft_p50_s": 0.9,
            "ttft_p99_s": 4.0,
            "requests_per_s": 12.5,
            "output_tokens_per_s": 1234.0,
        },
        "history": {
            "interval_s": 10.0,
            "end_s": 4660.0,
            "hit_rate": rates,
            "ttft_p50_s": rates,
            "ttft_p99_s": [1.0, 2.0, 3.0, 4.0],
            "requests_per_s": [1.0, 2.0, 3.0, 12.5],
            "output_tokens_per_s": [10.0, 20.0, 30.0, 1234.0],
        },
        "sessions": [session],
        "pins": [pin],
        "divergences": None,
        "tenants": [
            {
                "name": "alice",
                "requests": 7,
                "prompt_tokens": 99_000,
                "cached_share": 0.5,
                "limits": None,
            }
        ],
        **changed,
    }
