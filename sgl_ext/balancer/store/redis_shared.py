"""What balancers share through Redis or Valkey: buckets, presence, versions, a channel.

Times are the server's, so that the clocks of balancers do not matter.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sgl_ext.balancer.store.calls import Calls, settle
from sgl_ext.balancer.store.redis_server import PREFIX, RedisServer, texts
from sgl_ext.balancer.store.shared_state import CALL_S, PRESENT_S, Lease, Leased
from sgl_ext.supervision import Failed

_CHANNEL = f"{PREFIX}messages"
_NOW = "local t = redis.call('TIME'); local now = t[1] + t[2] / 1e6\n"
_LEASE = """
local key = P..'limit:'..ARGV[1]
local cap, take, need, extra = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local found = redis.call('HMGET', key, 'level', 'filled')
local level, filled = tonumber(found[1] or cap), tonumber(found[2] or now)
level = math.min(cap, level + math.max(now - filled, 0) * cap / 60)
level = math.min(cap, level - take)
local granted = 0
if level >= math.min(need, cap) then
  granted = need + math.min(extra, math.max(level - need, 0))
  level = level - granted
end
redis.call('HSET', key, 'level', string.format('%.17g', level), 'filled',
           string.format('%.17g', now))
redis.call('PEXPIRE', key, math.ceil((cap - level) / cap * 60000) + 1000)
return {string.format('%.17g', granted), string.format('%.17g', level)}
"""
_PRESENT = """
redis.call('ZADD', P..'balancers', now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', P..'balancers', '-inf', now - ARGV[2])
return redis.call('ZCARD', P..'balancers')
"""
_SHARE = """
local found = tonumber(redis.call('HGET', P..'newest:'..ARGV[1], 'v') or '-1')
if tonumber(ARGV[2]) > found then
  redis.call('HSET', P..'newest:'..ARGV[1], 'v', ARGV[2], 'd', ARGV[3])
end
"""


class RedisShared:
    """`SharedState` on a server."""

    def __init__(self, server: RedisServer, failed: Failed) -> None:
        self._server = server
        self._calls = Calls("sharing state between balancers", failed, CALL_S)
        self._publishing = Calls("sending messages to other balancers", failed, CALL_S)
        self._lease = server.script(_NOW + _LEASE)
        self._present = server.script(_NOW + _PRESENT)
        self._share = server.script(_SHARE)

    async def lease(self, lease: Lease) -> Leased:
        async def call() -> Leased:
            tokens, level = await self._lease(args=(lease.name, *texts(*lease[1:])))
            return Leased(float(tokens), float(level))

        return await self._calls.run(call)

    async def count_present(self, id: str) -> int:
        async def call() -> int:
            return int(await self._present(args=(id, *texts(PRESENT_S))))

        return await self._calls.run(call)

    async def newer(self, name: str, version: int) -> tuple[int, bytes] | None:
        async def call() -> tuple[int, bytes] | None:
            key = f"{PREFIX}newest:{name}"
            newest = int(await self._server.client.hget(key, "v") or -1)
            if newest <= version:
                return None
            newest, data = await self._server.client.hmget(key, "v", "d")
            return int(newest), data

        return await self._calls.run(call)

    async def share(self, name: str, version: int, data: bytes) -> None:
        async def call() -> None:
            await self._share(args=(name, version, data))

        await self._calls.run(call)

    async def publish(self, messages: Sequence[bytes]) -> None:
        async def call() -> None:
            async with self._server.client.pipeline(transaction=False) as pipeline:
                for message in messages:
                    pipeline.publish(_CHANNEL, message)
                await pipeline.execute()

        await self._publishing.run(call, sum(map(len, messages)))

    async def messages(self) -> AsyncGenerator[bytes, None]:
        subscriber: Any = self._server.subscriber()
        try:
            await subscriber.subscribe(_CHANNEL)
            async for message in subscriber.listen():
                yield message["data"]
        finally:
            await settle(subscriber.aclose())

    async def close(self) -> None:
        await self._server.close()
