"""Several HTTP processes of one engine: `--tokenizer-worker-num N`.

SGLang starts N workers, which accept connections at the same port. Each is an HTTP process as that
of other engines: it has all hooks, and caches of its own.

    client ──> any worker ──── its own conversation ───────────> answers it
                     └───────── another one's, by a socket ────> that worker answers

A conversation has one worker, by the number that the balancer gives it, so its turns find their
caches there, and its next turn is guessed there. The lead, worker 0, mirrors the scheduler's cache:
it has the prefix events, the pins and the changed settings of the engine. Requests without a
number, as those of a direct client, are answered where they arrive.

SGLang loads no plugins in workers, and takes the application that they serve from an environment
variable: that of `sgl_ext.engine.worker`. A worker that ends by itself ends the engine, as its HTTP
process does where there is one, because SGLang would start it again without what it knew.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from sgl_ext.engine.core.folder import folder
from sgl_ext.pin_mirror import PATH as PINS
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.wire.events import EVENTS_PATH, SUBSCRIBERS_PATH
from sgl_ext.wire.headers import CONVERSATION_HEADER
from sgl_ext.wire.orders import SETTINGS_PATH

_COUNT = "SGLEXT_TOKENIZER_WORKERS"
_APP = "SGLANG_HTTP_SERVER_APP_PATH"
_OF_THE_LEAD = (EVENTS_PATH, SUBSCRIBERS_PATH, PINS, SETTINGS_PATH)
_CONVERSATION = CONVERSATION_HEADER.encode()
# No server has this path for clients: the lead says by it that the cache was emptied.
_CLEARED = "/cleared"
# What another worker has sent, and goes no further.
_PASSED_ON = "sgl_ext.passed_on"
SENT_HEADERS = "sgl_ext.headers"
"""In the scope of a request that is proved to be a balancer's: its headers with the engine secret,
by which it is proved to another worker, too."""
_OF_A_CONNECTION = frozenset(
    (b"connection", b"transfer-encoding", b"keep-alive", b"expect", b"host")
)
_POLL_S = 0.05
# A worker closes an idle connection of another later than that one does, so none is closed when a
# request is sent.
_KEPT_S, _KEPT_BY_PEER_S = 15, 60


_watchdogs: list[Any] = []


def share_work(count: int, watchdog: Any = None) -> None:
    """Has SGLang start workers that serve ours. Call it in the main process, before it does.
    watchdog: SGLang's of this process's children."""
    if watchdog is not None:
        _watchdogs.append(watchdog)
    os.environ[_COUNT] = str(count)
    os.environ[_APP] = "sgl_ext.engine.worker:app"


def stop_watching() -> None:
    """Lets this process's children end. SGLang stops its watchdog where there are no workers, and
    here logs that they crashed."""
    for watchdog in _watchdogs:
        watchdog.stop()


class Workers:
    """The workers of an engine, as one of them sees them. number: its own."""

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.number = number
        self.count = count
        self._peers: dict[int, aiohttp.ClientSession] = {}
        self._serve_all = count == 1

    @classmethod
    def claim(cls) -> "Workers":
        """Takes the next number. Ends the engine if all are taken: then this process is in the
        place of a worker that has ended."""
        count = int(os.environ[_COUNT])
        for number in range(count):
            with suppress(FileExistsError):
                (folder() / f"worker-{number}").touch(exist_ok=False)
                return cls(number, count)
        for number in range(count):  # none waits for the one that has ended
            (folder() / f"drained-{number}").touch()
        os.kill(os.getppid(), signal.SIGTERM)
        sys.exit("sgl-ext: a tokenizer worker has ended, so the engine ends")

    @property
    def is_lead(self) -> bool:
        """Whether this is the process that has what an engine has once."""
        return self.number == 0

    def serve_all(self) -> bool:
        """Whether each of them takes requests of the others."""
        if not self._serve_all:
            self._serve_all = all(self._socket(number).exists() for number in range(self.count))
        return self._serve_all

    def of_request(self, scope: Any) -> int:
        """The worker that answers a request."""
        if self.count == 1 or _PASSED_ON in scope:
            return self.number
        path = scope["path"]
        if path in _OF_THE_LEAD:
            return 0
        if path != PREFILL and of_path(path).conversation is None:
            return self.number
        for name, value in scope["headers"]:
            if name == _CONVERSATION:
                with suppress(ValueError):
                    return int(value, 16) % self.count
        return self.number

    async def tell(self, scope: Any, body: bytes = b"") -> list[bytes | None]:
        """Sends a request to all other workers, unless another has sent it here: the body of each
        answer, None for one that is not 200."""
        if _PASSED_ON in scope and not self.is_lead:
            return []
        others = [number for number in range(self.count) if number != self.number]

        async def ask(number: int) -> bytes | None:
            with suppress(aiohttp.ClientError, OSError):
                async with self._ask(number, scope, body) as answer:
                    read = await answer.read()
                    return read if answer.status == HTTPStatus.OK else None
            return None

        return await asyncio.gather(*map(ask, others))

    async def tell_cleared(self) -> None:
        """Says to all others that the scheduler's cache was emptied."""
        await self.tell({"method": "POST", "path": _CLEARED, "query_string": b"", "headers": []})

    @asynccontextmanager
    async def serving(self, app: Any, on_cleared: Callable[[], object]) -> AsyncIterator[None]:
        """Answers other workers while the block runs. on_cleared: called when the lead says that
        the cache was emptied."""
        if self.count == 1:
            yield
            return

        async def passed_on(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == _CLEARED:
                on_cleared()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b""})
            else:
                await app({**scope, _PASSED_ON: True}, receive, send)

        server = _PeerServer(
            uvicorn.Config(
                passed_on,
                uds=str(self._socket(self.number)),
                lifespan="off",
                log_config=None,
                access_log=False,
                loop="none",
                timeout_keep_alive=_KEPT_BY_PEER_S,
            )
        )
        task = asyncio.create_task(server.serve())
        try:
            while not (server.started or task.done()):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            yield
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.gather(task, return_exceptions=True)
            for session in self._peers.values():
                await session.close()
            # Without a request so far, SGLang leaves SIGTERM to uvicorn, which waits for no other.
            self._mark_drained()

    async def drained(self, finish: Callable[[], Awaitable[object]]) -> None:
        """Returns once no worker has requests, and the lead has finished. Call it when this one has
        none: SGLang has the first that returns end the schedulers."""
        others = set(range(self.count)) - {self.number}
        if self.is_lead:
            await self._drained(others)
            await finish()
        self._mark_drained()
        await self._drained(others)

    def _mark_drained(self) -> None:
        (folder() / f"drained-{self.number}").touch()

    async def _drained(self, numbers: set[int]) -> None:
        while not all((folder() / f"drained-{n}").exists() for n in numbers):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _ask(self, number: int, scope: Any, body: bytes) -> Any:
        query = scope["query_string"].decode("latin-1")
        target = f"{scope['path']}?{query}" if query else scope["path"]
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope.get(SENT_HEADERS, scope["headers"])
            if name not in _OF_A_CONNECTION
        ]
        session = self._peers.get(number)
        if session is None:
            session = self._peers[number] = aiohttp.ClientSession(
                "http://worker",
                connector=aiohttp.UnixConnector(
                    str(self._socket(number)), limit=0, keepalive_timeout=_KEPT_S
                ),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            )
        return session.request(scope["method"], target, data=body, headers=headers)

    async def relay(self, number: int, scope: Any, body: bytes, send: Any) -> None:
        """Has another worker answer a request. Raises aiohttp's errors if it does not."""
        async with self._ask(number, scope, body) as answer:
            headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in _OF_A_CONNECTION
            ]
            start = {"type": "http.response.start", "status": answer.status, "headers": headers}
            await send(start)
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _socket(self, number: int) -> Path:
        return folder() / f"http-{number}.sock"


class _PeerServer(uvicorn.Server):
    """A server beside another one in its process, which takes the signals and logs the start."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _log_started_message(self, *_: Any) -> None:
        pass
