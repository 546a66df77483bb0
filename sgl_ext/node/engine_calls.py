"""What the launcher asks engines and its balancer about engines: those that it restarts, and those
that hang."""

from contextlib import suppress
from http import HTTPStatus
from typing import Any

import aiohttp

from sgl_ext.reading.client import SECRET_HEADER
from sgl_ext.settings.secrets import EngineSecret

_SUBSCRIBERS_PATH = "/sgl_ext/events/subscribers"
_TIMEOUT = aiohttp.ClientTimeout(total=5)
_FAILURES = (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError)


class EngineCalls:
    """Each call returns within seconds, and raises nothing."""

    def __init__(self, balancer_url: str, engine_secret: str | None) -> None:
        """engine_secret: the setting."""
        self._balancer_url = balancer_url
        self._engine_secret = engine_secret
        self._session: aiohttp.ClientSession | None = None

    async def is_ready(self, url: str) -> bool:
        """Whether the engine at this URL takes requests."""
        with suppress(*_FAILURES):
            async with self._get(f"{url}/ready") as answer:
                return answer.status == HTTPStatus.OK
        return False

    async def balancers(self, url: str) -> int | None:
        """How many processes of balancers send requests to the engine, or wait for answers of it.

        A balancer follows an engine's prefix events until the last answer of one that drains. None
        if the engine does not answer; 0 if it listens no longer.
        """
        try:
            async with self._get(url + _SUBSCRIBERS_PATH) as answer:
                return int((await answer.json())["subscribers"])
        except aiohttp.ClientConnectorError:
            return 0
        except _FAILURES:
            return None

    async def in_flight(self, id: str) -> int | None:
        """How many requests the node's balancer has at the engine; None if it does not say."""
        with suppress(*_FAILURES):
            rows = await self._rows()
            return sum(int(row["in_flight"]) for row in rows if row["id"] == id)
        return None

    async def hung_s(self) -> dict[str, float]:
        """How long engines hang, by their ids, as a process of the node's balancer sees it; none if
        it does not say."""
        with suppress(*_FAILURES):
            rows = await self._rows()
            return {str(row["id"]): float(row["hung_s"]) for row in rows if row["hung_s"]}
        return {}

    async def _rows(self) -> list[dict[str, Any]]:
        """The engines as the node's balancer lists them. Raises one of `_FAILURES`."""
        async with self._get(f"{self._balancer_url}/health") as answer:
            return list((await answer.json())["workers"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _get(self, url: str) -> "aiohttp.client._RequestContextManager":
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        secret = EngineSecret(self._engine_secret).sent  # its file may have changed
        return self._session.get(url, headers={SECRET_HEADER: secret})
