"""What each kind of key permits, and which tenant the engines get."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

from sgl_ext import keys
from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.key_file import KeysError
from sgl_ext.protocols import routes
from sgl_ext.settings.schema import Tenant
from tests.balancer.conftest import Connect, Engine, Serve, Start
from tests.balancer.wire import Raw
from tests.waiting import HANG_S

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
FORGED = {
    "x-tenant-id": "bob",
    "x-sgl-ext-cache-group": "bob",
    "x-sgl-ext-owner": "bob",
    "connection": "keep-alive, x-tenant-id, x-sgl-ext-owner, x-sgl-ext-cache-group",
}
_WHOSE = ("x-tenant-id", "x-sgl-ext-cache-group", "x-sgl-ext-owner")


class Keys:
    """A file of keys of three tenants, one of them an admin, and an operator's key."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "keys.toml"
        self.path.write_text("[tenants.root]\nadmin = true\n")
        self.alice, self.name = keys.add_key(self.path, "alice")
        self.bob, _ = keys.add_key(self.path, "bob")
        self.root, _ = keys.add_key(self.path, "root")
        self.operator = "operators-own"
        monkeypatch.setenv("AN_OPERATOR", self.operator)
        self.config: dict[str, Any] = {"keys": str(self.path), "api_key": "env:AN_OPERATOR"}


@pytest.fixture
def some_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(tmp_path, monkeypatch)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(client: ClientSession, method: str, path: str, **headers: str) -> int:
    async with client.request(method, path, json=BODY, headers=headers) as answer:
        await answer.read()
        return answer.status


def told(engine: Engine) -> tuple[Any, ...]:
    """The tenant headers of the engine's last request."""
    headers = engine.seen[-1][2]
    assert all(len(headers.getall(name, [])) <= 1 for name in _WHOSE)
    return tuple(headers.get(name) for name in _WHOSE)


async def test_without_keys_a_client_sets_the_tenant_and_no_other_internal_header(
    start: Start,
) -> None:
    engine = Engine("a")
    client = await start(engine)
    queue = "x-sgl-ext-queued-s", "x-sgl-ext-window-s"
    names = (*_WHOSE, *queue, "x-sgl-ext-engine-secret")
    forged = dict.fromkeys(names, "bob")
    assert await status(client, "POST", MESSAGES, **forged) == 200
    assert told(engine) == ("bob", None, None)
    assert not {*queue, "x-sgl-ext-engine-secret"} & set(engine.seen[-1][2])


async def test_the_key_decides_the_tenant(start: Start, some_keys: Keys) -> None:
    engine = Engine("a")
    client = await start(engine, **some_keys.config)
    for path in (MESSAGES, CHAT):
        for headers in (bearer(some_keys.alice), {"x-api-key": some_keys.alice}):
            for forged in ({}, FORGED, {"X-Tenant-Id": "bob", "x-tenant-id": "carol"}):
                assert await status(client, "POST", path, **headers, **forged) == 200
                assert told(engine) == ("alice", "alice", "alice")
                assert "authorization" not in engine.seen[-1][2]
                assert "x-api-key" not in engine.seen[-1][2]
    assert await status(client, "POST", CHAT, **bearer(some_keys.bob)) == 200
    assert told(engine) == ("bob", "bob", "bob")


async def test_a_request_without_a_valid_key_is_401(start: Start, some_keys: Keys) -> None:
    engine = Engine("a")
    client = await start(engine, **some_keys.config)
    bad = ({}, bearer(""), bearer("no"), bearer(some_keys.alice[:-1]), {"x-api-key": "\u017f"})
    for headers in bad:
        for path in (CHAT, "/v1/models", "/v1/pins", "/metrics", "/nowhere"):
            answer = await client.post(path, json=BODY, headers=headers)
            assert answer.status == 401, path
            assert (await answer.json())["error"]["type"] == "authentication_error"
    answer = await client.post(MESSAGES, json=BODY)
    assert (await answer.json())["type"] == "error"
    assert (await client.get("/health")).status == 200
    assert engine.seen == []


async def test_only_operators_and_admins_may_name_a_tenant(start: Start, some_keys: Keys) -> None:
    engine = Engine("a")
    groups = (Tenant("bob", 100, cache_group="team"), Tenant("carol", 100, cache_group="team"))
    client = await start(engine, **some_keys.config, tenants=groups)
    for key, own in ((some_keys.operator, None), (some_keys.root, "root")):
        assert await status(client, "POST", CHAT, **bearer(key)) == 200
        assert told(engine) == (own, own or "", None)
        for named, group in (("carol", "team"), ("alice", "alice"), ("new one", "new one")):
            assert (
                await status(client, "POST", CHAT, **bearer(key), **{"x-tenant-id": named}) == 200
            )
            assert told(engine) == (named, group, None)
        bad = {"x-tenant-id": "caf\u00e9"}
        assert await status(client, "POST", CHAT, **bearer(key), **bad) == 400
    assert await status(client, "POST", CHAT, **bearer(some_keys.bob)) == 200
    assert told(engine) == ("bob", "team", "bob")


ADMINISTRATION = [
    *(("POST", path) for path in routes.FANNED_OUT),
    ("GET", "/v1/loads"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("GET", "/sgl_ext/workers"),
    ("POST", "/sgl_ext/workers"),
    ("DELETE", "/sgl_ext/workers?url=http://x"),
    ("POST", "/sgl_ext/explain/v1/messages"),
]


async def test_administration_needs_an_operators_or_admins_key(
    start: Start, some_keys: Keys
) -> None:
    engine = Engine("a")
    client = await start(engine, **some_keys.config)
    for method, path in ADMINISTRATION:
        assert await status(client, method, path, **bearer(some_keys.alice)) == 403, path
    assert engine.seen == []
    for method, path in ADMINISTRATION:
        for key in (some_keys.operator, some_keys.root):
            assert await status(client, method, path, **bearer(key)) not in (401, 403), path
    answer = await client.get("/metrics", headers=bearer(some_keys.alice))
    assert "operator" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/l%6fads", "/%66lush_cache", "//flush_cache", "/v1/../flush_cache", "/v1/.", "/new_admin"],
)
async def test_disguised_spellings_of_forbidden_paths_are_404(
    serve: Serve, connect: Connect, some_keys: Keys, path: str
) -> None:
    engine = Raw()
    wire = await connect(await serve(engine, **some_keys.config))
    for method in (b"GET", b"POST"):
        head, _ = await wire.ask(
            b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nx-api-key: %b\r\n\r\n"
            % (method, path.encode(), some_keys.alice.encode())
        )
        assert head.startswith(b"HTTP/1.1 404 ")
    assert engine.requests == []


async def test_tenants_may_request_their_own_paths(start: Start, some_keys: Keys) -> None:
    engine = Engine("a")
    client = await start(engine, **some_keys.config)
    for method, path in (
        *(("POST", path) for path in routes.PLACED),
        *(("GET", path) for path in ("/v1/models", "/v1/models/m%2fx", "/model_info", "/api/tags")),
        ("POST", "/v1/prefill"),
        ("DELETE", "/v1/prefill?session=s"),
        ("GET", "/v1/pins"),
        ("DELETE", "/v1/pins?session=s"),
    ):
        assert await status(client, method, path, **bearer(some_keys.alice), **FORGED) == 200, path
        if path != "/v1/pins":
            assert told(engine) in (("alice", "alice", "alice"), ("alice", None, "alice")), path


async def test_a_tenant_sees_only_its_own_pins(start: Start, some_keys: Keys) -> None:
    engine = Engine("a")
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    engine.events.append(lines)
    pin = {"segment": None, "tokens": 1, "left_s": 1, "session": "s"}
    rows = [
        pin | {"prefix": f"{number:032x}", "owner": owner}
        for number, owner in enumerate(("alice", "bob", ""))
    ]
    lines.put_nowait(orjson.dumps({"seq": 1, "snapshot": True, "pinned": rows}) + b"\n")
    client = await start(engine, **some_keys.config)

    async def shown(key: str, **headers: str) -> list[str]:
        async with client.get("/v1/pins", headers={**bearer(key), **headers}) as answer:
            return [row["owner"] for row in (await answer.json())["pins"]]

    async with asyncio.timeout(HANG_S):
        while not await shown(some_keys.operator):
            pass
    assert await shown(some_keys.operator) == ["alice", "bob", ""]
    assert await shown(some_keys.root) == ["alice", "bob", ""]
    assert await shown(some_keys.alice) == ["alice"]
    assert await shown(some_keys.alice, **{"x-sgl-ext-owner": "bob"}) == ["alice"]


async def test_without_keys_the_tenant_header_is_trusted_for_isolation(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    assert await status(client, "POST", CHAT, **{"x-tenant-id": "bob"}) == 200
    assert told(engine) == ("bob", None, None)
    client = await start(other := Engine("b"), tenant_isolation="on")
    forged = {"x-tenant-id": "bob", "x-sgl-ext-cache-group": "alice"}
    assert await status(client, "POST", CHAT, **forged) == 200
    assert told(other) == ("bob", "bob", None)
    assert await status(client, "POST", CHAT) == 200
    assert told(other) == (None, "", None)


async def test_isolation_can_be_off_with_keys(start: Start, some_keys: Keys) -> None:
    engine = Engine("a")
    client = await start(engine, **some_keys.config, tenant_isolation="off")
    assert await status(client, "POST", CHAT, **bearer(some_keys.alice), **FORGED) == 200
    assert told(engine) == ("alice", None, "alice")


async def test_a_changed_key_file_applies_without_a_restart(
    serve: Serve, some_keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    balancer = await serve(Raw(), **some_keys.config)
    alice, operator = bearer(some_keys.alice), bearer(some_keys.operator)
    async with ClientSession(f"http://127.0.0.1:{balancer.port}") as client:
        assert await status(client, "POST", CHAT, **alice) == 200  # its head is cached
        carol, _ = keys.add_key(some_keys.path, "carol")
        assert await status(client, "POST", CHAT, **bearer(carol)) == 401
        balancer.sweep(balancer.now)
        assert await status(client, "POST", CHAT, **bearer(carol)) == 200
        keys.revoke_key(some_keys.path, some_keys.name)
        balancer.sweep(balancer.now)
        assert await status(client, "POST", CHAT, **alice) == 401
        assert await status(client, "POST", CHAT, **bearer(carol)) == 200

        some_keys.path.write_text(f"[keys.a]\nsha256 = '{some_keys.alice}'")
        for _ in range(2):
            balancer.sweep(balancer.now)
        assert await status(client, "POST", CHAT, **bearer(carol)) == 200
        assert await status(client, "POST", CHAT, **alice) == 401
        some_keys.path.unlink()
        balancer.sweep(balancer.now)
        assert await status(client, "POST", CHAT, **bearer(carol)) == 200
        async with client.get("/metrics", headers=operator) as answer:
            page = await answer.text()
    assert 'sgl_ext_file_reloads_total{file="keys",result="applied"} 2.0' in page
    assert 'sgl_ext_file_reloads_total{file="keys",result="refused"} 2.0' in page
    said = [record.getMessage() for record in caplog.records]
    assert sum("the earlier keys stay valid" in line for line in said) == 2
    assert not any(key in line for line in said for key in (some_keys.alice, carol))


def test_a_malformed_key_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeysError):
        KeyFileReloader(tmp_path / "none", Metrics())
    (tmp_path / "keys").write_text("")
    key_file = KeyFileReloader(tmp_path / "keys", Metrics())
    assert not key_file.reload_if_changed()
    (tmp_path / "keys").write_text("# another")
    assert key_file.reload_if_changed()
    assert not key_file.reload_if_changed()


async def test_no_key_is_in_the_request_log(start: Start, some_keys: Keys, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    client = await start(Engine("a"), **some_keys.config, request_log=str(log))
    assert await status(client, "POST", CHAT, **bearer(some_keys.alice)) == 200
    await client.get("/metrics", headers=bearer(some_keys.operator))
    async with client.post(CHAT, data=b"{", headers=bearer(some_keys.alice)) as answer:
        assert answer.status in (400, 415)
    assert some_keys.alice not in log.read_text()
