"""The life of a request as docs/how/architecture.md has it is the one that runs."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from aiohttp import web
from sgl_ext_cpu.node import ROOT

from tests.balancer.conftest import Engine, Start

PAGE = ROOT / "docs/how/architecture.md"


def documented() -> list[str]:
    """The balancer's functions that the steps name, in their order."""
    text = PAGE.read_text().partition("## The life of a request\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. .*$", text, re.MULTILINE)
    return [name for step in steps for name in re.findall(r"`(\w+\.\w+)`", step)]


async def streams(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'event: message_stop\ndata: {"type": "message_stop"}\n\n')
    return response


async def test_a_request_goes_the_way_that_the_page_describes(start: Start) -> None:
    client = await start(Engine("a", streams))
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/sgl_ext/" in frame.f_code.co_filename:
            called.setdefault(frame.f_code.co_qualname)

    body = {"model": "m", "max_tokens": 8, "stream": True}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    sys.setprofile(note)
    try:
        answer = await client.post("/v1/messages", json=body)
        await answer.read()
    finally:
        sys.setprofile(None)
    assert answer.status == 200
    steps = documented()
    assert len(steps) >= 8
    assert [name for name in called if name in steps] == steps
