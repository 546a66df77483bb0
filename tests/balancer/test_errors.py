"""Bad requests and missing engines: a clear error in the protocol of the caller."""

from __future__ import annotations

import multiprocessing
import warnings
from http import HTTPStatus
from typing import Any

import orjson
import pytest
from yarl import URL

from sgl_ext.balancer.relay.services import error_response
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.request_ids import new_request_id
from tests.balancer.conftest import Engine, Start
from tests.waiting import HANG_S

JSON = {"content-type": "application/json"}
PATHS = ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/generate"]


def message_of(path: str, document: Any, kind: str | None = None) -> str:
    """The message, once the document is proven to have its protocol's shape."""
    error = document["error"]
    if path.startswith("/v1/messages"):
        assert document["type"] == "error"
        assert set(document) == {"type", "error", "request_id"}
        assert set(error) == {"type", "message"}
    else:
        assert set(document) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] is None or isinstance(error["code"], str)
    if kind:
        assert error["type"] == kind
    return str(error["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_malformed_json_is_400_and_names_the_body(start: Start, path: str) -> None:
    engine = Engine("a")
    client = await start(engine)
    answer = await client.post(path, data=b'{"messages": [', headers=JSON)
    assert answer.status == 400
    assert "body" in message_of(path, await answer.json(), "invalid_request_error")
    assert engine.seen == []
    assert (await client.post(path, json={})).status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_field_that_decides_in_the_balancer_must_have_its_type(
    start: Start, path: str
) -> None:
    engine = Engine("a")
    client = await start(engine)
    answer = await client.post(path, json={"store": "no"})
    assert answer.status == 400
    document = await answer.json()
    assert "store: must be true or false" in message_of(path, document, "invalid_request_error")
    assert document["error"].get("param", "store") == "store"
    assert engine.seen == []
    assert (await client.post(path, json={"store": False})).status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_content_type_is_415_and_named(start: Start, path: str) -> None:
    client = await start(Engine("a"))
    answer = await client.post(path, data=b"{}", headers={"content-type": "text/plain"})
    assert answer.status == 415
    assert "text/plain" in message_of(path, await answer.json(), "invalid_request_error")


async def test_a_rejected_request_is_counted_under_its_path(start: Start) -> None:
    client = await start(Engine("a"))
    assert (await client.put("/v1/prefill", data="{}")).status == 405
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_requests_total{path="/v1/prefill",status="405"} 1.0' in page


async def test_a_rejected_health_check_is_not_counted(start: Start) -> None:
    client = await start(Engine("a"))
    headers = {"content-encoding": "br"}
    assert (await client.get("/health", data=b"x", headers=headers)).status == 415
    page = await (await client.get("/metrics")).text()
    assert 'path="/health"' not in page


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_over_the_limit_is_413_and_names_it(start: Start, path: str) -> None:
    client = await start(Engine("a"), max_body_bytes=100)
    answer = await client.post(path, json={"text": "x" * 101})
    assert answer.status == 413
    assert "100 bytes" in message_of(path, await answer.json())
    assert (await client.post(path, json={"text": "x"})).status == 200


@pytest.mark.parametrize("path", ["/v1/messages/unknown", "/v1/unknown", "/update_weights"])
async def test_an_unknown_path_is_404(start: Start, path: str) -> None:
    client = await start(Engine("a"))
    answer = await client.post(path, json={})
    assert answer.status == 404
    assert path in message_of(path, await answer.json(), "not_found_error")


@pytest.mark.parametrize("path", ["compact", "moderations", "x/y"])
async def test_a_service_beside_the_stored_responses_is_404_and_named(
    start: Start, path: str
) -> None:
    client = await start(Engine("a"))
    answer = await client.post(f"/v1/responses/{path}", json={"input": "a"})
    assert answer.status == 404
    message = message_of("/v1/responses", await answer.json(), "not_found_error")
    assert message == f"POST /v1/responses/{path}: Not Found"
    of_a_response = await client.post("/v1/responses/resp_1", json={})
    assert of_a_response.status == 405


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("//v1/messages", "http://127.0.0.1:30000"),
        ("/v1/v1/messages", "http://127.0.0.1:30000"),
        ("/v1/v1/chat/completions", "http://127.0.0.1:30000/v1"),
        ("/chat/completions", "http://127.0.0.1:30000/v1"),
    ],
)
async def test_a_wrong_base_url_is_told_the_right_one(start: Start, path: str, base: str) -> None:
    client = await start(Engine("a"))
    answer = await client.post(URL.build(path=path, encoded=True), json={})
    assert answer.status == 404
    shape = "/v1/messages" if path.endswith("messages") else path
    message = message_of(shape, await answer.json(), "not_found_error")
    assert path in message
    assert message.endswith(base)


async def test_a_list_of_models_has_a_head(start: Start) -> None:
    client = await start(Engine("a"))
    answer = await client.head("/v1/models")
    assert (answer.status, await answer.read()) == (200, b"")
    assert (await client.get("/v1/models")).status == 200


async def test_a_wrong_method_is_405(start: Start) -> None:
    client = await start(Engine("a"))
    answer = await client.get("/v1/messages")
    assert answer.status == 405
    assert "GET" in message_of("/v1/messages", await answer.json())


@pytest.mark.parametrize("path", PATHS)
async def test_no_engine_is_an_overload_with_retry_after(start: Start, path: str) -> None:
    client = await start()
    answer = await client.post(path, json={})
    is_anthropics = path.startswith("/v1/messages")
    assert answer.status == (529 if is_anthropics else 503)
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers
    kind = "overloaded_error" if is_anthropics else "server_error"
    assert "engine" in message_of(path, await answer.json(), kind)
    assert (await client.get("/health")).status == 503


async def test_an_engines_own_error_passes_through(start: Start) -> None:
    async def refuse(_: Any) -> Any:
        from aiohttp import web

        return web.json_response({"error": {"message": "max_tokens: too many"}}, status=400)

    engine = Engine("a", refuse)
    client = await start(engine, Engine("b", refuse))
    answer = await client.post("/v1/chat/completions", json={"model": "m"})
    assert answer.status == 400
    assert (await answer.json())["error"]["message"] == "max_tokens: too many"


async def test_the_key_guards_everything_but_health(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "s3cret")
    engine = Engine("a")
    client = await start(engine, api_key="env:A_KEY")
    for headers in (
        {},
        {"authorization": "Bearer no"},
        {"x-api-key": "no"},
        {"x-api-key": "\u017f"},
    ):
        answer = await client.post("/v1/messages", json={}, headers=headers)
        assert answer.status == 401
        assert answer.headers["x-should-retry"] == "false"
        message_of("/v1/messages", await answer.json(), "authentication_error")
    assert (await client.get("/metrics")).status == 401
    assert (await client.get("/health")).status == 200
    assert (await client.head("/")).status == 200
    assert engine.seen == []
    for headers in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
        assert (await client.post("/v1/messages", json={}, headers=headers)).status == 200
    assert all("s3cret" not in str(headers) for _, _, headers in engine.seen)


async def test_engines_that_refuse_a_connection_are_no_engine(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    assert engine.server is not None
    await engine.server.close()
    answer = await client.post("/v1/messages", json={})
    assert answer.status == 529
    assert "retry-after" in answer.headers
    assert (await client.get("/health")).status == 503


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"{}", b"{", b"x" * 200])
async def test_every_answer_has_an_id_of_its_own(start: Start, path: str, body: bytes) -> None:
    client = await start(Engine("a"), max_body_bytes=100)
    name = "request-id" if path.startswith("/v1/messages") else "x-request-id"
    seen = set()
    for _ in range(2):
        answer = await client.post(path, data=body, headers=JSON)
        (request_id,) = answer.headers.getall(name)
        assert request_id.startswith("req_")
        document = await answer.json()
        if path.startswith("/v1/messages") and answer.status != 200:
            assert document["request_id"] == request_id
        seen.add(request_id)
    assert len(seen) == 2


@pytest.mark.parametrize("path", ["/v1/messages/nothing", "/v1/models", "/health", "/metrics"])
async def test_answers_of_the_control_plane_have_an_id_too(start: Start, path: str) -> None:
    client = await start(Engine("a"))
    answer = await client.get(path)
    name = "request-id" if path.startswith("/v1/messages") else "x-request-id"
    assert len(answer.headers.getall(name)) == 1


async def test_the_balancer_names_the_request_and_not_its_engine(start: Start) -> None:
    async def named(_: Any) -> Any:
        from aiohttp import web

        headers = {"request-id": "req_engine"}
        return web.json_response({"type": "error"}, status=400, headers=headers)

    client = await start(Engine("a", named))
    for _ in range(2):
        answer = await client.post("/v1/messages", json={})
        (request_id,) = answer.headers.getall("request-id")
        assert request_id.startswith("req_")
        assert request_id != "req_engine"


async def test_a_stream_has_an_id(start: Start) -> None:
    async def stream(request: Any) -> Any:
        from aiohttp import web

        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return response

    client = await start(Engine("a", stream))
    answer = await client.post("/v1/chat/completions", json={})
    assert (await answer.read()) == b"data: 1\n\n"
    assert answer.headers["x-request-id"].startswith("req_")


def test_a_rate_limit_makes_clients_retry() -> None:
    error = BalancerError(HTTPStatus.TOO_MANY_REQUESTS, "Too many tokens a minute.", 7)
    for path, kind in (("/v1/messages", "rate_limit_error"), ("/v1/responses", "rate_limit_error")):
        status, reason, lines, body = error_response(path, error)
        assert (status, reason) == (429, b"Too Many Requests")
        assert b"retry-after: 7\r\n" in lines
        assert b"x-should-retry" not in lines
        assert orjson.loads(body)["error"]["type"] == kind
    assert b"x-should-retry" not in error_response("/", BalancerError(error.status, "Later."))[2]


def test_forked_processes_give_different_ids() -> None:
    mine, ours = new_request_id(), multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=lambda: ours.put(new_request_id()))
    with warnings.catch_warnings(action="ignore"):  # of forking beside threads
        child.start()
    theirs = ours.get(timeout=HANG_S)
    child.join()
    assert mine[:20] != theirs[:20]
