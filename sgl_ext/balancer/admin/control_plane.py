"""The way to the control plane: the aiohttp application in this process, over socket pairs.

To an exchange it is a worker like any other, so a client's one connection
serves both planes, under one key check and one set of limits. A socket pair
has no name, so nothing but the balancer reaches the application.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection


class ControlPool(ConnectionPool):
    """Connections to an application. Run `start` before the first request."""

    def __init__(self, app: web.Application) -> None:
        super().__init__("http://balancer")
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)

    async def start(self) -> None:
        """Starts the application."""
        await self._runner.setup()

    async def stop(self) -> None:
        """Ends it, with its connections."""
        self.close()
        await self._runner.cleanup()

    async def _open(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None, "the application is not running"
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(server, theirs)
        _, connection = await loop.create_unix_connection(
            lambda: UpstreamConnection(self), sock=ours
        )
        return connection
