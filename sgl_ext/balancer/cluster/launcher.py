"""The way to the launcher of this node: HTTP over a Unix socket in its log directory.

Only the launcher can start an engine again. It also knows how far one that starts has come.
"""

import asyncio
from typing import Any, NamedTuple

import aiohttp
import orjson

# It checks new flags with SGLang's parser before it answers, which takes seconds.
_TIMEOUT = aiohttp.ClientTimeout(total=60)
_LOOK_TIMEOUT = aiohttp.ClientTimeout(total=1)
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


class LauncherUnreachable(Exception):
    """There is no launcher, or it does not answer. The message says which."""


class Answer(NamedTuple):
    """The status and the JSON document that the launcher answered."""

    status: int
    document: Any


class Launcher:
    """The launcher of this node.

    is_there: whether a launcher started this balancer.
    """

    def __init__(self, socket: str | None) -> None:
        """socket: the path of the launcher's socket; None: there is no launcher."""
        self.is_there = socket is not None
        self._session: aiohttp.ClientSession | None = None
        if socket is not None:
            connector = aiohttp.UnixConnector(socket, limit=4)
            self._session = aiohttp.ClientSession("http://launcher", connector=connector)

    async def children(self) -> list[dict[str, Any]]:
        """The engines that the launcher keeps: of each its `name`, `url`, `state` ("ready",
        "starting", "draining" or "ended"), `stage`, `progress` (0 to 1, or None) and `restarts`.

        On Ray, the process that keeps them. [] if there is no launcher, or if it does not answer
        within a second.
        """
        try:
            rows: list[dict[str, Any]] = (await self._ask("GET", "/children")).document["children"]
        except LauncherUnreachable:
            return []
        return rows

    async def restart(self, body: bytes) -> Answer:
        """Begins a restart. Raises LauncherUnreachable."""
        return await self._ask("POST", "/restart", body)

    async def last_restart(self) -> Answer:
        """The last restart. Raises LauncherUnreachable."""
        return await self._ask("GET", "/restart")

    async def reload(self) -> Answer:
        """Reads the node's settings again. Raises LauncherUnreachable."""
        return await self._ask("POST", "/reload", b"")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        if self._session is None:
            message = "No launcher started this balancer: restart engines where they were started."
            raise LauncherUnreachable(message)
        limit = _LOOK_TIMEOUT if body is None else _TIMEOUT
        try:
            async with self._session.request(method, path, data=body, timeout=limit) as answer:
                return Answer(answer.status, orjson.loads(await answer.read()))
        except _FAILURES as error:
            raise LauncherUnreachable(f"The launcher does not answer: {error!r}") from None
