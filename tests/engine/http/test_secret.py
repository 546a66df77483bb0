"""Whom an engine believes: its balancer, which has the secret, and nobody else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from sgl_ext.engine.core.request_context import convert
from sgl_ext.engine.http import secret as secret_middleware
from sgl_ext.engine.http.secret import install, send_secret
from sgl_ext.settings.secrets import EngineSecret
from sgl_ext.wire.headers import INTERNAL_HEADERS, SECRET_HEADER

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"
INTERNAL = {name: "7" for name in INTERNAL_HEADERS if name != SECRET_HEADER}
OTHERS = {"x-sgl-ext-session-id": "mine", "x-sgl-ext-priority": "3"}


@pytest.fixture(autouse=True)
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_middleware, "_own", None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.secret"
    path.write_text(OLD)
    return path


async def echo(request: Request) -> JSONResponse:
    """What reaches the application: the path, and the headers that the extension reads."""
    seen = {name: value for name, value in request.headers.items() if name.startswith("x-")}
    return JSONResponse({"path": request.url.path, "headers": seen})


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


def made(host: str, source: str | None = None) -> Starlette:
    """An application as an engine at this address serves it."""
    anything = Route("/{path:path}", echo, methods=["GET", "HEAD", "POST", "DELETE"])
    app = Starlette(routes=[WebSocketRoute("/v1/realtime", talk), anything])
    with patch.object(secret_middleware, "in_effect", lambda: SimpleNamespace(host=host)):
        install(app, "http://127.0.0.1:1", EngineSecret(source))
    return app


def client(host: str, source: str | None = None) -> TestClient:
    return TestClient(made(host, source))


def refused(reason: str) -> float:
    value = REGISTRY.get_sample_value("sgl_ext_requests_refused_total", {"reason": reason})
    return value or 0.0


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_with_the_secret_everything_is_believed_and_nothing_sees_the_secret(
    host: str, file: Path
) -> None:
    given = {**INTERNAL, **OTHERS}
    answer = client(host, f"file:{file}").post("/generate", headers={**given, SECRET_HEADER: OLD})
    assert answer.json()["headers"] == given
    assert SECRET_HEADER not in answer.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages"),
        ("POST", "/generate"),
        ("POST", "/flush_cache"),
        ("POST", "/v1/prefill"),
        ("GET", "/v1/pins"),
        ("DELETE", "/v1/pins"),
        ("GET", "/sgl_ext/events"),
        ("GET", "/server_info"),
        ("GET", "/metrics"),
        ("GET", "/health_generate"),
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "/"),
    ],
)
def test_without_the_secret_nothing_but_probes_is_answered(
    method: str, path: str, file: Path
) -> None:
    before = refused("missing")
    answer = client("10.0.0.1", f"file:{file}").request(method, path, headers=INTERNAL)
    assert answer.status_code == 401
    assert "engine secret" in answer.text
    assert refused("missing") == before + 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/messages", ["error", "type"]), ("/v1/chat/completions", ["error", "type"])],
)
def test_the_refusal_has_the_shape_of_the_protocol(path: str, kind: list[str], file: Path) -> None:
    answer = client("10.0.0.1", f"file:{file}").post(path)
    error: Any = answer.json()
    for key in kind:
        error = error[key]
    assert error == "authentication_error"
    assert (answer.json().get("type") == "error") is (path == "/v1/messages")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_probe_without_the_secret_is_answered_and_costs_no_generation(
    path: str, file: Path
) -> None:
    engine = client("10.0.0.1", f"file:{file}")
    assert engine.get(path).json()["path"] == "/ready"
    assert engine.head(path).status_code == 200
    assert engine.get(path, headers={SECRET_HEADER: OLD}).json()["path"] == path


@pytest.mark.parametrize("wrong", ["none", "", OLD[:-1], f"{OLD}x", NEW, "\u00e9" * 20])
def test_a_wrong_secret_is_refused_on_every_path_so_that_a_balancer_notices(
    wrong: str, file: Path
) -> None:
    engine, before = client("10.0.0.1", f"file:{file}"), refused("wrong")
    sent = {SECRET_HEADER.encode(): wrong.encode("latin-1")}
    for path in ("/ready", "/health", "/sgl_ext/events"):
        assert engine.get(path, headers=sent).status_code == 401
    assert refused("wrong") == before + 3


def test_two_secrets_are_none(file: Path) -> None:
    twice = [(SECRET_HEADER, OLD), (SECRET_HEADER, OLD)]
    assert client("10.0.0.1", f"file:{file}").get("/ready", headers=twice).status_code == 401


def test_each_line_is_accepted_and_a_change_is_read_without_a_restart(file: Path) -> None:
    now, secret = [0.0], EngineSecret(f"file:{file}")
    app = secret_middleware.SecretMiddleware(made("127.0.0.1"), secret, lambda: now[0])
    engine = TestClient(app)

    def status(line: str) -> int:
        now[0] += 1
        return engine.get("/x", headers={SECRET_HEADER: line}).status_code

    assert (status(OLD), status(NEW)) == (200, 401)
    file.write_text(f"{NEW}\n{OLD}\n")
    assert (status(OLD), status(NEW)) == (200, 200)
    file.write_text("short")
    assert (status(OLD), status(NEW)) == (200, 200)
    assert REGISTRY.get_sample_value("sgl_ext_secret_reload_failures_total")
    file.write_text(f"{NEW}  \n")
    assert (status(OLD), status(NEW)) == (401, 200)


def test_on_loopback_an_engine_without_a_secret_believes_everyone() -> None:
    seen = client("127.0.0.1").get("/sgl_ext/events", headers={**INTERNAL, **OTHERS}).json()
    assert seen["headers"] == {**INTERNAL, **OTHERS}


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
def test_elsewhere_an_engine_without_a_secret_serves_and_believes_nobody(host: str) -> None:
    engine = client(host)
    sent = {**INTERNAL, **OTHERS, SECRET_HEADER: OLD}
    assert engine.post("/generate", headers=sent).json()["headers"] == OTHERS
    assert engine.get("/sgl_ext/events", headers=sent).status_code == 401


def test_a_web_socket_needs_the_secret_too(file: Path) -> None:
    engine = client("10.0.0.1", f"file:{file}")
    with engine.websocket_connect("/v1/realtime", headers={SECRET_HEADER: OLD}):
        pass
    with pytest.raises(WebSocketDisconnect), engine.websocket_connect("/v1/realtime"):
        pass


async def test_a_dry_run_of_a_believed_request_is_believed(file: Path) -> None:
    app = made("10.0.0.1", f"file:{file}")
    headers = [(name.encode(), value.encode()) for name, value in INTERNAL.items()]
    dry_run = await convert(app, "/generate", headers, {})
    assert dry_run.status == 200
    assert b'"x-tenant-id":"7"' in dry_run.answer
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as stranger:
        assert (await stranger.post("/generate")).status_code == 401


def test_sglangs_warm_up_of_its_own_server_sends_the_secret_and_to_nobody_else(file: Path) -> None:
    made("10.0.0.1", f"file:{file}")
    sent = list[Any]()

    def original(*args: Any, **options: Any) -> None:
        sent.append(options.get("headers"))

    send_secret(
        original, None, method="GET", url="http://127.0.0.1:1/model_info", headers={"a": "b"}
    )
    send_secret(original, None, "POST", "http://127.0.0.1:1/generate")
    send_secret(original, None, method="GET", url="http://127.0.0.1:10/model_info")
    send_secret(original, None, method="GET", url="https://elsewhere/", headers=None)
    ours = {"x-request-id": "sglang-warmup", SECRET_HEADER: OLD}
    assert sent == [{"a": "b", **ours}, ours, None, None]
