"""Without keys, a web page that a browser on the node shows can neither administer nor ask."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

import pytest
from aiohttp import ClientSession

from sgl_ext import keys
from sgl_ext.protocols import routes
from tests.balancer.conftest import Engine, Start

WORKERS = "/sgl_ext/workers"
OTHER = {"url": "http://127.0.0.1:9"}
BODY = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


async def message(
    client: ClientSession, status: int, method: str, path: str, **headers: str
) -> str:
    async with client.request(method, path, headers=headers) as answer:
        assert answer.status == status, await answer.text()
        return str((await answer.json())["error"]["message"]) if status >= 400 else ""


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("origin", "https://evil.example"),
        ("origin", "http://localhost.evil.example:30000"),
        ("origin", "http://127.0.0.1@evil.example"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("host", "evil.example:30000"),
        ("host", "10.0.0.7"),
        ("host", "127.0.0.1.evil.example"),
    ],
)
async def test_a_page_cannot_administer(start: Start, header: str, value: str) -> None:
    engine = Engine("a")
    client = await start(engine)
    for method, path in [
        ("POST", WORKERS),
        ("DELETE", f"{WORKERS}?url={engine.url}"),
        ("GET", WORKERS),
        ("GET", "/v1/loads"),
        ("GET", "/server_info"),
        *(("POST", path) for path in routes.FANNED_OUT),
    ]:
        assert (await message(client, 403, method, path, **{header: value})).startswith(header)
    assert not engine.seen


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "http://[::1]:3000"},
        {"origin": "vscode-file://vscode-app"},
        {"host": "LOCALHOST:30000", "sec-fetch-site": "none"},
        {"host": "node.localhost."},
        {"host": "[::1]:30000"},
        {"host": "127.9.9.9"},
    ],
)
async def test_this_machine_administers(start: Start, headers: dict[str, str]) -> None:
    client = await start(Engine("a"))
    await message(client, 200, "POST", "/flush_cache", **headers)
    assert (await client.post(WORKERS, json=OTHER, headers=headers)).status == 201


async def test_a_page_cannot_ask_a_model_even_under_a_name_pointed_at_us(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    rebound = {"host": "evil.example", "origin": "http://evil.example"}
    answer = await client.post(CHAT, json=BODY, headers=rebound)
    assert answer.status == 403
    assert not engine.seen
    # A proxy may pass on the name by which its clients know it.
    assert (await client.post(CHAT, json=BODY, headers={"host": "models.example"})).ok
    assert (await client.get("/metrics", headers={"host": "10.0.0.7"})).ok


DATA = (
    *("/v1/contexts", "/v1/responses/resp_1", "/v1/pins", "/metrics", "/metrics/engines"),
    *("/model_info", "/get_model_info", "/v1/loads", routes.TEMPLATE, routes.STATE, routes.LIVE),
)


@pytest.mark.parametrize("path", DATA)
async def test_a_page_under_a_name_pointed_at_us_reads_no_data(start: Start, path: str) -> None:
    engine = Engine("a")
    client = await start(engine)
    for host in ("evil.example", "evil.example:30000", "127.0.0.1.evil.example", "1.2"):
        assert (await message(client, 403, "GET", path, host=host)).startswith("host")
    assert not engine.seen


@pytest.mark.parametrize(
    "host", ["10.0.0.7:30000", "[2001:db8::1]:30000", gethostname(), "localhost"]
)
async def test_data_is_read_by_an_address_or_this_machine_s_name(start: Start, host: str) -> None:
    client = await start(Engine("a"))
    for path in ("/metrics", "/model_info", "/v1/pins"):
        await message(client, 200, "GET", path, host=host)


async def test_clients_read_the_models_by_any_name(start: Start) -> None:
    client = await start(Engine("a"))
    for path in ("/v1/models", "/v1/models/a", "/", "/health"):
        assert (await client.get(path, headers={"host": "models.example"})).ok


@pytest.mark.parametrize("path", routes.FANNED_OUT)
async def test_a_picture_s_address_is_no_action(start: Start, path: str) -> None:
    engine = Engine("a")
    client = await start(engine)
    answer = await client.get(path)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert not engine.seen


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
@pytest.mark.parametrize("path", [WORKERS, "/abort_request", "/v1/contexts"])
async def test_a_body_of_the_control_plane_is_json(
    start: Start, path: str, kind: str | None
) -> None:
    engine = Engine("a")
    client = await start(engine)
    headers = {"content-type": kind} if kind else {}
    skipped = [] if kind else ["content-type"]
    answer = await client.post(
        path, data=b'{"url": "http://x:1"}', headers=headers, skip_auto_headers=skipped
    )
    assert answer.status == 415
    assert "content-type: must be application/json" in await answer.text()
    assert not engine.seen


async def test_a_key_is_asked_for_instead_where_there_are_keys(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.root]\nadmin = true\n")
    key, _ = keys.add_key(path, "root")
    client = await start(Engine("a"), keys=str(path))
    headers = {"host": "models.example", "origin": "https://models.example"}
    await message(client, 401, "POST", "/flush_cache", **headers)
    await message(client, 200, "POST", "/flush_cache", **headers, authorization=f"Bearer {key}")
