"""The page's files, who may load them, and the deletion of a pin. `tests/page` looks at it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiohttp import web

import sgl_ext.balancer
from sgl_ext import keys
from tests.balancer.conftest import Engine, Start

FILES = Path(sgl_ext.balancer.__file__).parent / "ui"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_only_a_browser_gets_the_page_at_the_root(start: Start) -> None:
    client = await start(Engine("a"))
    shown = await client.get("/", headers=BROWSER)
    assert shown.content_type == "text/html"
    assert await shown.text() == await (await client.get("/sgl_ext/ui")).text()
    probe = await client.get("/")
    assert (probe.content_type, await probe.text()) == ("text/plain", "sgl-ext balancer\n")
    assert {shown.headers["vary"], probe.headers["vary"]} == {"accept"}
    assert (await client.head("/")).status == 200


async def test_its_policy_allows_only_its_own_files(start: Start) -> None:
    client = await start(Engine("a"))
    policy = (await client.get("/", headers=BROWSER)).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


async def test_a_key_protects_the_state_and_not_the_files(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys.add_key(file, "alice")
    client = await start(Engine("a"), keys=str(file))
    for path in ("/", "/sgl_ext/ui", *(f"/sgl_ext/ui/{each.name}" for each in FILES.iterdir())):
        assert (await client.get(path, headers=BROWSER)).status == 200
    for path in ("/sgl_ext/state", "/sgl_ext/live", "/v1/pins", "/sgl_ext/uix"):
        assert (await client.get(path)).status == 401
    assert (await client.delete("/v1/pins?prefix=a")).status == 401
    assert (await client.post("/sgl_ext/ui")).status == 401


@pytest.mark.parametrize("path", ["/sgl_ext/ui/none.js", "/sgl_ext/ui/..%2fparts.py"])
async def test_it_has_no_other_files(start: Start, path: str) -> None:
    assert (await (await start(Engine("a"))).get(path)).status == 404


async def test_another_machine_s_browser_gets_the_page_and_not_the_state(start: Start) -> None:
    client = await start(Engine("a"))
    elsewhere = {**BROWSER, "host": "gpu-box:30000"}
    assert (await client.get("/", headers=elsewhere)).status == 200
    # As a browser asks for a module.
    script = {**elsewhere, "origin": "http://gpu-box:30000"}
    assert (await client.get("/sgl_ext/ui/page.js", headers=script)).status == 200
    assert (await client.get("/sgl_ext/live", headers=elsewhere)).status == 403


@pytest.mark.parametrize("file", sorted(FILES.iterdir()), ids=lambda file: file.name)
def test_its_files_name_nothing_elsewhere(file: Path) -> None:
    addresses = set(re.findall(r"\w+://[^\s\"'`]*", file.read_text()))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def deleting(name: str) -> Engine:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"deleted": 1})

    return Engine(name, answer)


async def test_a_pin_is_deleted_at_one_engine_or_at_all(start: Start) -> None:
    one, two = deleting("one"), deleting("two")
    client = await start(one, two)
    answer = await client.delete("/v1/pins", params={"prefix": "ab", "worker": one.url})
    assert await answer.json() == {one.url: {"deleted": 1}}
    assert [len(engine.seen) for engine in (one, two)] == [1, 0]
    assert "prefix=ab" in one.seen[0][0]
    answer = await client.delete("/v1/pins", params={"prefix": "ab"})
    assert (await answer.json()).keys() == {one.url, two.url}
    answer = await client.delete("/v1/pins", params={"prefix": "ab", "worker": "engine-9"})
    assert answer.status == 404
    assert "worker: no worker is 'engine-9'" in await answer.text()
