"""The verbs with a real balancer, in front of engines that are scripted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sgl_ext.key_file import hash_of
from tests.balancer.conftest import Engine, Start, start
from tests.cli.conftest import Run

__all__ = ["start"]  # a fixture
KEY = "sgl-" + "a" * 43
Verb = Callable[..., Any]


async def answer(request: web.Request) -> web.StreamResponse:
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "tiny"}]})
    if request.path == "/v1/pins":
        return web.json_response({"deleted": 1})
    return web.json_response({"usage": {"prompt_tokens": 5, "completion_tokens": 1}})


@pytest.fixture
async def engines() -> list[Engine]:
    return [Engine("a", answer, "tiny"), Engine("b", answer, "tiny")]


@pytest.fixture
async def verb(
    start: Start, engines: list[Engine], run: Run, monkeypatch: pytest.MonkeyPatch
) -> Verb:
    """Runs a command line with a balancer in front of both engines."""
    monkeypatch.delenv("SGL_EXT_API_KEY", raising=False)
    client = await start(*engines, diagnose=True)
    await client.post("/v1/messages", json={"model": "tiny", "messages": []})
    url = str(client._base_url).rstrip("/")
    return lambda *argv: asyncio.to_thread(run, *argv, "--url", url)


async def test_status_and_pins(verb: Verb) -> None:
    code, out, err = await verb("status")
    assert (code, err) == (0, "")
    shown = re.sub(r"up \d+ s", "up 0 s", out)  # on a slow machine some seconds have passed
    assert "ok   model tiny   up 0 s   0 in flight   0 of 1,024 queued" in shown
    assert out.count("ready") == 2
    state = json.loads((await verb("status", "--json"))[1])
    assert state["node"]["status"] == "ok"
    assert await verb("pins") == (0, "There are no pins.\n", "")
    assert (await verb("pins", "delete", "d9b8")) == (0, "d9b8: 2 deleted\n", "")


async def test_an_engine_is_drained_and_taken_back(verb: Verb, engines: list[Engine]) -> None:
    url = engines[0].url
    code, out, _ = await verb("drain", url, "--wait")
    assert (code, out) == (0, f"{url} is drained. Take it back: sgl-ext undrain {url}\n")
    row = next(line for line in (await verb("status"))[1].splitlines() if line.startswith(url))
    assert row.split()[1] == "drained"
    code, out, _ = await verb("add", url)
    assert (code, "ready" in out) == (0, True)
    assert (await verb("status"))[1].count("ready") == 2
    code, _, err = await verb("add", "http://127.0.0.1:30001/path")
    assert (code, "url: " in err) == (1, True)


async def test_a_prompt_is_explained_and_divergences_are_shown(verb: Verb, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    (tmp_path / "body.json").write_text(json.dumps(body))
    code, out, _ = await verb("explain", str(tmp_path / "body.json"))
    assert code == 0
    assert "prompt_tokens" in out
    code, out, _ = await verb("doctor")
    assert (code, "1 prompt" in out or "no prompts yet" in out) == (0, True)


async def test_clients_are_connected_to_the_node_s_model(verb: Verb) -> None:
    code, out, _ = await verb("clients", "claude-code")
    assert (code, "--model tiny" in out) == (0, True)


async def test_without_a_launcher_nothing_is_restarted(verb: Verb) -> None:
    code, out, err = await verb("restart", "--rolling")
    assert (code, out, err.count("\n")) == (1, "", 1)


async def test_administration_needs_an_operator_s_key(
    start: Start, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.toml").write_text(
        f'[keys.0a1b2c3d]\ntenant = "alice"\nsha256 = "{hash_of(KEY.encode())}"\n'
    )
    client = await start(Engine("a", answer), keys=str(tmp_path / "keys.toml"))
    url = str(client._base_url).rstrip("/")
    monkeypatch.delenv("SGL_EXT_API_KEY", raising=False)
    code, _, err = await asyncio.to_thread(run, "status", "--url", url)
    assert (code, "needs a key" in err) == (1, True)
    monkeypatch.setenv("SGL_EXT_API_KEY", KEY)
    code, _, err = await asyncio.to_thread(run, "status", "--url", url)
    assert (code, "needs an operator's key" in err) == (1, True)
    code, out, _ = await asyncio.to_thread(run, "clients", "--url", url)
    assert (code, "ANTHROPIC_AUTH_TOKEN=YOUR_KEY" in out) == (0, True)
