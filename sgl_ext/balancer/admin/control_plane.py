"""Connects the data path to the aiohttp application in this process over socket pairs.

To an exchange the application is a worker like any other, so that one client connection serves
both planes with one key check and one set of limits. A socket pair has no address: only the
balancer reaches the application.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from sgl_ext.balancer.http.connection_pool import ConnectionPool
from sgl_ext.balancer.http.upstream import UpstreamConnection


class ControlPool(ConnectionPool):
    """Connections to an application. Call `start` before the first request."""

    def __init__(self, app: web.Application) -> None:
        super().__init__("http://balancer")
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)

    async def start(self) -> None:
        """Starts the application."""
        await self._runner.setup()

    async def stop(self) -> None:
        """Stops the application and closes its connections."""
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
