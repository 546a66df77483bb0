"""How the extension changes SGLang's HTTP server as a whole."""

import asyncio
from typing import Any

import pytest

from sgl_ext.engine import http_server


class Manager:
    gracefully_exit = False


async def test_an_engine_begins_to_end_as_soon_as_sigterm_was_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_SIGTERM_POLL_S", 0)
    manager, ended = Manager(), list[Any]()

    async def end(this: Any) -> None:
        ended.append(this)

    waiting = asyncio.create_task(http_server.await_sigterm(end, manager))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not ended
    manager.gracefully_exit = True
    await waiting
    assert ended == [manager]
