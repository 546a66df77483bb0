"""The request hook by itself: what it hands on, and what it keeps of a stripped header."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import HTTPException

from sgl_ext.engine import body
from sgl_ext.engine.hints import WHOLE, current
from sgl_ext.engine.settings import EngineSettings
from sgl_ext.requests.facts import ClientFacts
from sgl_ext.requests.headers import HeaderStrip
from tests.requests.test_system_text import HEADER, S


class Request:
    """As much of SGLang's request as the hook touches."""

    def __init__(
        self, document: Any, path: str = "/v1/messages", headers: dict[str, str] | None = None
    ) -> None:
        self.url = SimpleNamespace(path=path)
        self.headers = headers or {}
        self.state = SimpleNamespace()
        self.parsed = document
        self.parses = 0

    async def body(self) -> bytes:
        return orjson.dumps(self.parsed)

    async def json(self) -> Any:
        self.parses += 1
        return self.parsed


async def test_a_header_is_stripped_once_and_its_facts_stay_with_the_request() -> None:
    request = Request({"system": f"{HEADER[:-1]}; cc_is_subagent=true;\n{S}"})
    first = await body.read_body(Request.json, request)
    assert first == {"system": S}
    assert await body.read_body(Request.json, request) is first
    assert request.parses == 1
    assert request.state.client == ClientFacts("2.1.197.3af", "sdk-cli", None, True)


@pytest.mark.parametrize("document", [{"system": S}, {"messages": []}, [1], "text", None])
async def test_without_a_header_the_parsed_body_is_handed_on_as_it_is(document: Any) -> None:
    request = Request(document)
    assert await body.read_body(Request.json, request) is document
    assert request.state.client == ClientFacts()


async def test_without_names_nothing_is_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_strip", lambda: HeaderStrip(()))
    request = Request({"system": f"{HEADER}\n{S}"})
    assert await body.read_body(Request.json, request) is request.parsed


@pytest.mark.parametrize(("sort_tools", "first"), [(True, "a"), (False, "b")])
async def test_tools_are_put_in_order_for_those_who_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, sort_tools: bool, first: str
) -> None:
    monkeypatch.setattr(body, "_settings", lambda: EngineSettings(sort_tools=sort_tools))
    request = Request({"tools": [{"name": "b"}, {"name": "a"}], "messages": []})
    assert (await body.read_body(Request.json, request))["tools"][0] == {"name": first}


async def test_what_is_asked_of_the_cache_stays_with_the_request() -> None:
    document = {"prompt": "text", "nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}
    headers = {"x-tenant-id": "t", "session-id": "s", "x-sgl-ext-session-final": "true"}
    await body.read_body(Request.json, Request(document, "/v1/completions", headers))
    reading = current()
    assert reading is not None
    assert (reading.owner, reading.session, reading.is_last) == ("t", "s", True)
    assert reading.pins == ((WHOLE, 3600.0),)


async def test_a_malformed_wish_is_refused_naming_the_field() -> None:
    document = {"text": "t", "nvext": {"cache_control": {"type": "ephemeral", "ttl": "forever"}}}
    with pytest.raises(HTTPException, match=r"^400: nvext\.cache_control\.ttl: "):
        await body.read_body(Request.json, Request(document, "/generate"))
