"""The connections to the balancer's own application."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from sgl_ext.balancer.admin.app import ControlPool


async def test_a_client_that_leaves_while_one_is_opened_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = []
    make = socket.socketpair

    def socketpair() -> tuple[socket.socket, socket.socket]:
        pairs.append(make())
        return pairs[-1]

    pool = ControlPool(web.Application())
    await pool.start()
    monkeypatch.setattr(socket, "socketpair", socketpair)
    task = asyncio.create_task(pool._open())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pool.stop()
    ((ours, _),) = pairs
    assert ours.fileno() == -1
