"""Keeps the balancer's list of workers up to date, through its admin API."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import aiohttp


class WorkerList:
    """The balancer's list of workers.

    Errors are ignored: a balancer that does not answer is restarting. It starts with all engines
    on its list, and its own probes find those that do not answer.
    """

    def __init__(self, balancer_url: str, key: str | None) -> None:
        self._url = f"{balancer_url}/sgl_ext/workers"
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def remove(self, engine_url: str) -> None:
        """The balancer sends nothing more to an engine that has ended."""
        await self._request("DELETE", params={"url": engine_url})

    async def add(self, engine_url: str) -> None:
        """The balancer sends requests to a starting engine as soon as it is ready."""
        await self._request("POST", json={"url": engine_url})

    async def _request(self, method: str, **what: Any) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session,
                session.request(method, self._url, headers=self._headers, **what),
            ):
                pass
