"""A dry run goes through the whole application, and ends where its generation would begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sgl_ext.engine.core.request_context import convert, current_dry_run
from sgl_ext.engine.http import request_hook
from sgl_ext.engine.http.request_hook import send_hints

PATH = "/v1/messages"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


async def answer(request: Request) -> JSONResponse:
    """Answers as SGLang does: an error of validation or conversion with 400."""
    body = await request_hook.read_body(Request.json, request)
    if "messages" not in body:
        return JSONResponse({"error": "messages: missing"}, 400)
    made = SimpleNamespace(kv_hints=None, session_params=None, cache_salt=None, sent=body)
    try:
        send_hints(None, made)
    except ValueError as error:
        return JSONResponse({"error": str(error)}, 400)
    return JSONResponse({"generated": True})


@pytest.fixture
def app() -> Starlette:
    return Starlette(routes=[Route(PATH, answer, methods=["POST"])])


async def test_it_notes_the_request_that_would_be_generated_from(app: Starlette) -> None:
    headers = [(b"x-sgl-ext-cache-group", b"team"), (b"content-length", b"999"), (b"x-a", b"\xe9")]
    found = await convert(app, PATH, headers, BODY)
    request: Any = found.request
    assert request.cache_salt == "4:team"
    assert (found.context.path, found.context.group) == (PATH, "team")
    assert found.context.dry_run is None
    assert current_dry_run() is None


async def test_a_rejected_body_has_its_error(app: Starlette) -> None:
    found = await convert(app, PATH, (), {"model": "m"})
    assert found.request is None
    assert (found.status, orjson.loads(found.answer)) == (400, {"error": "messages: missing"})
