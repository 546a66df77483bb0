"""A connection to Redis or Valkey 6.2 or later, and what is checked of it at start.

All keys begin with `sgl-ext:`, so that others may use the database, too. Lua scripts touch several
keys, which are not known before they run: so it is one server, with replicas if you like, and not
Redis Cluster. `ONE_FORMAT` is the version of what the keys hold.
"""

import logging
from collections.abc import Sequence
from typing import Any

from redis import asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sgl_ext.balancer.store.calls import settle
from sgl_ext.balancer.store.documents import WAIT_S, StoreUnreachable, StoreUnusable
from sgl_ext.settings.secrets import StoreAddress

log = logging.getLogger(__name__)

PREFIX = "sgl-ext:"
_FORMAT = b"1"
_LEAST_VERSION = (6, 2)
_CONNECTIONS = 16


class RedisServer:
    """The connections of one process, which are made when they are used."""

    def __init__(self, address: StoreAddress, connections: int = _CONNECTIONS) -> None:
        self.address = address
        try:
            pool = redis.BlockingConnectionPool.from_url(
                address.url,
                max_connections=connections,
                timeout=WAIT_S,
                socket_timeout=WAIT_S,
                socket_connect_timeout=WAIT_S,
                socket_keepalive=True,
                # A server that was restarted has closed the connections of the pool.
                retry=Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),
            )
        except (ValueError, TypeError) as error:
            raise StoreUnusable(self._named(f"cannot be used: {error}")) from None
        self.client: Any = redis.Redis.from_pool(pool)

    def script(self, text: str) -> Any:
        """A Lua script, in which `P` is the prefix of keys."""
        return self.client.register_script(f"local P = '{PREFIX}'\n{text}")

    def subscriber(self) -> Any:
        """A connection that receives messages."""
        return self.client.pubsub(ignore_subscribe_messages=True)

    async def check(self) -> None:
        """Raises StoreUnusable if the server cannot be used, and logs what it does not promise."""
        try:
            about = await self.client.info("everything")
            await self.client.set(f"{PREFIX}format", _FORMAT, nx=True)
            found = await self.client.get(f"{PREFIX}format")
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise StoreUnusable(self._named(f"the server refuses this user: {error}")) from None
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            raise StoreUnreachable(self._named(f"cannot be reached: {error}")) from None
        except exceptions.RedisError as error:
            raise StoreUnusable(self._named(f"cannot be used: {error}")) from None
        if found != _FORMAT:
            reason = f"its keys {PREFIX}* belong to another program or another version"
            raise StoreUnusable(self._named(reason))
        version = str(about["redis_version"])
        if tuple(map(int, version.split(".")[:2])) < _LEAST_VERSION:
            raise StoreUnusable(self._named(f"version {version} is too old; it must be 6.2"))
        if about.get("cluster_enabled"):
            raise StoreUnusable(self._named("Redis Cluster is not supported: give one server"))
        await self._warn(about)

    async def _warn(self, about: dict[str, Any]) -> None:
        policy = str(about.get("maxmemory_policy", ""))
        if policy.startswith("allkeys"):
            log.warning(self._named(f"maxmemory-policy {policy} may evict what is in use"))
        if not about.get("aof_enabled") and not await self._saves():
            reason = "the server writes nothing to disk (appendonly no): a restart loses all"
            log.warning(self._named(reason))
        elif not about.get("aof_enabled"):
            reason = "the server writes snapshots only (appendonly no): a crash loses the last ones"
            log.warning(self._named(reason))

    async def _saves(self) -> bool:
        """Whether the server writes snapshots; also if it does not say so."""
        try:
            found = await self.client.config_get("save")
        except exceptions.RedisError:  # a managed server may not permit it
            return True
        return bool(found.get("save", "yes"))

    async def close(self) -> None:
        await settle(self.client.aclose())

    def _named(self, reason: str) -> str:
        return f"store={self.address.shown!r}: {reason}"


def texts(*values: float | int) -> Sequence[str]:
    """Numbers as scripts read them without a loss."""
    return [repr(value) for value in values]
