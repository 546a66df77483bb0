"""Bad requests and missing engines: a clear answer in the caller's protocol, and it serves on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.balancer.conftest import Engine, Start

JSON = {"content-type": "application/json"}
PATHS = ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/generate"]


def message_of(path: str, document: Any, kind: str | None = None) -> str:
    """The message, once the document is proven to have its protocol's shape."""
    error = document["error"]
    if path.startswith("/v1/messages"):
        assert document["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(document) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
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
async def test_a_wrong_content_type_is_415_and_named(start: Start, path: str) -> None:
    client = await start(Engine("a"))
    answer = await client.post(path, data=b"{}", headers={"content-type": "text/plain"})
    assert answer.status == 415
    assert "text/plain" in message_of(path, await answer.json(), "invalid_request_error")


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


async def test_a_wrong_method_is_405(start: Start) -> None:
    client = await start(Engine("a"))
    answer = await client.get("/v1/messages")
    assert answer.status == 405
    assert "GET" in message_of("/v1/messages", await answer.json())


@pytest.mark.parametrize("path", PATHS)
async def test_no_engine_is_503_with_retry_after(start: Start, path: str) -> None:
    client = await start()
    answer = await client.post(path, json={})
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "engine" in message_of(path, await answer.json())
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
    assert answer.status == 503
    assert "retry-after" in answer.headers
    assert (await client.get("/health")).status == 503
