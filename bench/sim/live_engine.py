"""A simulated engine on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.sim.engine import Engine, EngineConfig, Event, Request
from bench.sim.event_publisher import Publisher
from bench.sim.prompts import answer_to, content_of, prompt_blocks
from bench.trace.calls import CHAT
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import Chain, read_chain
from sgl_ext.reading.strip import HeaderStrip, strip_request

_DEFAULT_ANSWER_TOKENS = 16
_BEGIN = 32  # characters that tell texts of the trace apart


def _is_user(message: dict[str, Any]) -> bool:
    return message.get("role") == "user"


class TooLong(ValueError):
    """A request that no engine of this size could ever run."""


class Live:
    """An engine on the event loop's clock: a request's two events become futures."""

    def __init__(self, config: EngineConfig, *, plugin: bool) -> None:
        self.engine = Engine(config)
        self.publisher = Publisher(self.engine)
        self.plugin = plugin
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.arrivals: list[tuple[float, str]] = []  # when, and the conversation's first words
        self._strip = HeaderStrip() if plugin else HeaderStrip(())
        self._loop = asyncio.get_running_loop()
        self._waits: dict[Request, dict[str, asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def read(self, path: str, body: dict[str, Any]) -> tuple[Request, str]:
        """A request and the answer it will get."""
        body = strip_request(of_path(path), body, self._strip).body
        chat = body if path == CHAT else {"messages": [{"role": "user", "content": body["text"]}]}
        begun = next(filter(_is_user, chat["messages"]), chat["messages"][-1])
        self.arrivals.append((self._loop.time(), content_of(begun)[:_BEGIN]))
        limits = body if path == CHAT else body.get("sampling_params") or {}
        tokens = limits.get("max_completion_tokens") or limits.get("max_tokens")
        tokens = tokens or limits.get("max_new_tokens") or _DEFAULT_ANSWER_TOKENS
        answer = answer_to(content_of(chat["messages"][-1]), tokens)
        blocks = prompt_blocks(chat)
        prompt_tokens = blocks.tokens
        blocks.feed((answer.encode(),))
        chain = read_chain(of_path(path), body) if self.plugin else Chain()
        return Request(blocks.keys, prompt_tokens, tokens, chain), answer

    async def generate(self, request: Request) -> AsyncIterator[None]:
        """Comes by at the first token and at the end."""
        waits = {kind: self._loop.create_future() for kind in ("first", "done")}
        self._waits[request] = waits
        self._take(self.engine.submit(request, self._loop.time()))
        for future in waits.values():
            await future
            yield

    def flush(self) -> None:
        """Forgets what no running request uses."""
        self.engine.flush()
        self.publisher.changed()

    def _wake(self) -> None:
        self._take(self.engine.advance(self._loop.time()))

    def _take(self, events: Sequence[Event]) -> None:
        for _, kind, request in events:
            waits = self._waits[request]
            if kind == "refused":
                waits["first"].set_exception(TooLong())
            else:
                waits[kind].set_result(None)
            if kind != "first":
                del self._waits[request]
            if kind == "done":
                self.prompt_tokens += request.prompt_tokens
                self.cached_tokens += request.cached_tokens
                self.output_tokens += request.output_tokens
        self.publisher.changed()
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.next_at()
        self._timer = self._loop.call_at(at, self._wake) if at < float("inf") else None
