"""A proxy between a client and a node, which remembers what was asked and answered."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tests.clients.agents import Turn
from tests.sdk_models import problems

_HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
_GENERATES = re.compile(r"/v1/(messages|responses|chat/completions|completions)")


@dataclass(frozen=True)
class Exchange:
    """A request of a client, and its whole answer."""

    path: str
    body: bytes
    status: int
    kind: str
    answer: bytes

    def documents(self) -> list[Any]:
        """The JSON of the answer: one, or that of each event of a stream."""
        if not self.kind.startswith("text/event-stream"):
            return [json.loads(self.answer)]
        found = re.findall(rb"^data: ?(\{.*\})$", self.answer.replace(b"\r", b""), re.MULTILINE)
        return list(map(json.loads, found))

    def turn(self) -> Turn | None:
        """The prompt's tokens, and how many of them were cached; None if it does not say."""
        used: dict[str, Any] = {}
        for each in self.documents():
            inner = each.get("message") or each.get("response") or each
            used |= {name: n for name, n in (inner.get("usage") or {}).items() if n is not None}
        if not used:
            return None
        if "messages" in self.path:
            read = used.get("cache_read_input_tokens", 0)
            whole = used["input_tokens"] + used.get("cache_creation_input_tokens", 0) + read
            return Turn(whole, read)
        whole = used.get("prompt_tokens") or used["input_tokens"]
        details = used.get("prompt_tokens_details") or used.get("input_tokens_details") or {}
        return Turn(whole, details.get("cached_tokens") or 0)


@dataclass
class Recorder:
    """A proxy in front of the node at `upstream`; clients use `url`."""

    upstream: str
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def generated(self) -> list[Exchange]:
        """The requests for an answer of the model that did not fail."""
        asked = [each for each in self.exchanges if _GENERATES.fullmatch(each.path)]
        return [each for each in asked if each.status == 200]

    def turns(self) -> list[Turn]:
        return [turn for each in self.generated() if (turn := each.turn())]

    def problems(self) -> str:
        """Where an answer is not what the protocol's SDK reads, and each error; a line for each."""
        found = []
        for each in self.exchanges:
            if each.status >= 400 and each.path != "/":
                found.append(f"{each.path}: {each.status}: {each.answer[:300]!r}")
            found += problems(each.path, each.status, each.kind, each.answer)
        return "\n".join(dict.fromkeys(found))

    async def relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {n: v for n, v in request.headers.items() if n.lower() not in _HOP}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self.upstream + request.path_qs, data=body, headers=headers
            ) as got,
        ):
            kept = {n: v for n, v in got.headers.items() if n.lower() not in _HOP}
            answer = web.StreamResponse(status=got.status, headers=kept)
            if request.method == "HEAD":
                return answer
            await answer.prepare(request)
            whole = b""
            try:
                async for piece in got.content.iter_any():
                    whole += piece
                    await answer.write(piece)
                await answer.write_eof()
            finally:
                kind = got.headers.get("content-type", "")
                self.exchanges.append(Exchange(request.path, body, got.status, kind, whole))
        return answer


@contextmanager
def recording(upstream: str) -> Iterator[Recorder]:
    """Runs a proxy in a thread of its own."""
    recorder = Recorder(upstream)
    loop, is_ready = asyncio.new_event_loop(), threading.Event()

    async def serve(stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", recorder.relay)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        is_ready.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(stop),))
    thread.start()
    is_ready.wait()
    try:
        yield recorder
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
