"""Documents, and what balancers share, in Redis or Valkey 6.2 or later.

All keys begin with `sgl-ext:`, so that others may use the database, too. Lua scripts touch several
keys, which are not known before they run: so it is one server, with replicas if you like, and not
Redis Cluster. `ONE_FORMAT` is the version of what the keys hold.

Each method of the documents is one Lua script, and so one round trip and atomic.

    sgl-ext:doc:KEY     hash: i items, a about, p the key of the document that it continues,
                        t ttl, u last use, e expiry, l its place in the list of its owner
    sgl-ext:expiry      sorted set of KEY by expiry
    sgl-ext:use:TENANT  sorted set of KEY by last use
    sgl-ext:sizes       hash of KEY to "bytes tenant"
    sgl-ext:held        hash of each tenant's bytes
    sgl-ext:total       all bytes
    sgl-ext:list:OWNER  sorted set of "id KEY": what the lists of an owner show

The balancers evict and expire, because the server knows neither chains nor tenants. As a backstop a
document also has a TTL of the server, an hour longer: without balancers prompts do not stay.
`maxmemory` should be above the limit. If the server evicts a document itself (volatile-*), its
chain is unknown, and the account is corrected when it would have expired.

Balancers share buckets, presence, versions and a channel. Times are the server's, so that the
clocks of balancers do not matter.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, cast

from redis import asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import Calls, settle
from sgl_ext.balancer.store.documents import (
    LONGEST_CHAIN,
    SWEEP_BATCH,
    WAIT_S,
    Document,
    Found,
    Listed,
    StoreUnreachable,
    StoreUnusable,
    key_of,
    tenant_of,
)
from sgl_ext.balancer.store.shared_state import (
    CALL_S,
    KEPT_DAYS,
    PRESENT_S,
    Batch,
    Lease,
    Leased,
    Use,
)
from sgl_ext.protocols.errors import body_too_large
from sgl_ext.settings.secrets import StoreAddress
from sgl_ext.supervision import Failed

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


_DOCUMENT_BYTES = 256  # the hash itself and its places in the other keys
_BACKSTOP_S = 3600.0
_TOO_LARGE = -1
_LIST_S = 7 * 86_400.0  # longer than a listed document lives without a use

_FORGET = """
local function forget(key)
  local size, tenant = string.match(redis.call('HGET', P..'sizes', key) or '', '^(%d+) (.*)$')
  local list = redis.call('HGET', P..'doc:'..key, 'l')
  if list then
    local owner, member = string.match(list, '^(.*) (%S+ %x+)$')
    redis.call('ZREM', P..'list:'..owner, member)
  end
  redis.call('UNLINK', P..'doc:'..key)
  redis.call('ZREM', P..'expiry', key)
  if not size then return 0 end
  redis.call('HDEL', P..'sizes', key)
  redis.call('ZREM', P..'use:'..tenant, key)
  redis.call('DECRBY', P..'total', size)
  if redis.call('HINCRBY', P..'held', tenant, -size) <= 0 then
    redis.call('HDEL', P..'held', tenant)
  end
  return 1
end
"""
# By the rule of `victim_of`. All victims are found first: if the document does not fit, nothing
# is changed.
_PUT = """
local key, tenant, size, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now, ttl, parent, items, about = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local old = tonumber(string.match(redis.call('HGET', P..'sizes', key) or '0', '^%d+'))
local total = tonumber(redis.call('GET', P..'total') or '0') + size - old
local held, tenants = {}, 0
local flat = total > limit and redis.call('HGETALL', P..'held') or {}
for k = 1, #flat, 2 do
  held[flat[k]], tenants = tonumber(flat[k + 1]), tenants + 1
end
if not held[tenant] then tenants = tenants + 1 end
held[tenant] = (held[tenant] or 0) + size - old
local victims, rank = {}, {}
while total > limit do
  local from = tenant
  if held[tenant] * tenants <= total then
    for name, bytes in pairs(held) do
      if bytes > held[from] or (bytes == held[from] and name > from) then from = name end
    end
  end
  local at = rank[from] or 0
  local victim = redis.call('ZRANGE', P..'use:'..from, at, at)[1]
  rank[from] = at + 1
  if not victim then return -1 end
  if victim ~= key then
    local bytes = tonumber(string.match(redis.call('HGET', P..'sizes', victim) or '0', '^%d+'))
    victims[#victims + 1] = victim
    held[from], total = held[from] - bytes, total - bytes
    if held[from] <= 0 then held[from], tenants = nil, tenants - 1 end
  end
end
for _, victim in ipairs(victims) do forget(victim) end
forget(key)
local expires = string.format('%.17g', now + ttl)
redis.call('HSET', P..'doc:'..key, 'i', items, 'a', about, 'p', parent, 't', ttl, 'u', now,
           'e', expires)
redis.call('PEXPIRE', P..'doc:'..key, ARGV[10])
if ARGV[11] ~= '' then
  local member = ARGV[12]..' '..key
  redis.call('HSET', P..'doc:'..key, 'l', ARGV[11]..' '..member)
  redis.call('ZADD', P..'list:'..ARGV[11], 0, member)
  redis.call('PEXPIRE', P..'list:'..ARGV[11], LIST_MS)
end
redis.call('ZADD', P..'expiry', expires, key)
redis.call('ZADD', P..'use:'..tenant, now, key)
redis.call('HSET', P..'sizes', key, string.format('%d %s', size, tenant))
redis.call('HINCRBY', P..'held', tenant, size)
redis.call('INCRBY', P..'total', size)
return #victims
""".replace("LIST_MS", str(int(_LIST_S * 1000)))
# What the server evicted itself is only found here.
_LISTING = """
local list, from, limit, now = P..'list:'..ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local found = {}
while true do
  local members = redis.call('ZRANGEBYLEX', list, from, '+', 'LIMIT', 0, limit)
  for _, member in ipairs(members) do
    local id, key = string.match(member, '^(.*) (%x+)$')
    local about, used, expires = unpack(redis.call('HMGET', P..'doc:'..key, 'a', 'u', 'e'))
    if not expires then
      redis.call('ZREM', list, member)
    elseif tonumber(expires) > now then
      found[#found + 1] = {id, about, redis.call('HSTRLEN', P..'doc:'..key, 'i'), used, expires}
      if #found == limit then return found end
    end
    from = '('..member
  end
  if #members < limit then return found end
end
"""
_WALK = """
local function walk(key, now)
  local keys = {}
  for depth = 0, LONGEST do
    local found = redis.call('HMGET', P..'doc:'..key, 'e', 'p')
    if not found[1] or tonumber(found[1]) <= now then return nil end
    keys[#keys + 1] = key
    if found[2] == '' then return keys end
    key = found[2]
  end
end
""".replace("LONGEST", str(LONGEST_CHAIN))
_CHAIN = """
local keys, size, items = walk(ARGV[1], tonumber(ARGV[2])), 0, {}
if not keys then return false end
for _, key in ipairs(keys) do size = size + redis.call('HSTRLEN', P..'doc:'..key, 'i') end
if size > tonumber(ARGV[3]) then return -1 end
for k = #keys, 1, -1 do items[#items + 1] = redis.call('HGET', P..'doc:'..keys[k], 'i') end
return items
"""
# Of equal uses the end of a chain is evicted first, because it needs those before it.
_USE = """
local now, tenant = tonumber(ARGV[2]), ARGV[3]
for k, key in ipairs(walk(ARGV[1], now) or {}) do
  local ttl, used, list = unpack(redis.call('HMGET', P..'doc:'..key, 't', 'u', 'l'))
  if (now - used) * 100 >= tonumber(ttl) then
    local expires = string.format('%.17g', now + ttl)
    redis.call('HSET', P..'doc:'..key, 'u', ARGV[2], 'e', expires)
    redis.call('PEXPIRE', P..'doc:'..key, math.floor((ttl + ARGV[4]) * 1000))
    redis.call('ZADD', P..'expiry', expires, key)
    redis.call('ZADD', P..'use:'..tenant, string.format('%.17g', now + k * 1e-6), key)
    if list then
      redis.call('PEXPIRE', P..'list:'..string.match(list, '^(.*) %S+ %x+$'), LIST_MS)
    end
  end
end
""".replace("LIST_MS", str(int(_LIST_S * 1000)))
_DELETE = """
local expires = redis.call('HGET', P..'doc:'..ARGV[1], 'e')
if not expires or tonumber(expires) <= tonumber(ARGV[2]) then return 0 end
return forget(ARGV[1])
"""
_SWEEP = """
local expired = redis.call('ZRANGEBYSCORE', P..'expiry', '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, key in ipairs(expired) do forget(key) end
return #expired
"""
_Script = Callable[..., Awaitable[Any]]


class RedisDocuments:
    """`Documents` on a server; others may use it at the same time."""

    def __init__(self, server: RedisServer, limit_bytes: int, metrics: Metrics) -> None:
        self._server = server
        self._limit_bytes = limit_bytes
        self._reading = Calls("reading the store of responses and contexts", metrics.store_failed)
        self._writing = Calls("writing the store of responses and contexts", metrics.store_failed)
        self._put: _Script = server.script(_FORGET + _PUT)
        self._chain: _Script = server.script(_WALK + _CHAIN)
        self._listing: _Script = server.script(_LISTING)
        self._use: _Script = server.script(_WALK + _USE)
        self._delete: _Script = server.script(_FORGET + _DELETE)
        self._sweep: _Script = server.script(_FORGET + _SWEEP)

    async def get(self, owner: str, id: str, now: float) -> Found | None:
        async def read() -> list[bytes | None]:
            name = f"sgl-ext:doc:{key_of(owner, id).hex()}"
            found: list[bytes | None] = await self._server.client.hmget(name, "i", "a", "e")
            return found

        items, about, expires = await self._reading.run(read)
        if items is None or about is None or expires is None or float(expires) <= now:
            return None
        return Found(items, about, float(expires))

    async def chain(self, owner: str, id: str, now: float, limit_bytes: int) -> list[bytes] | None:
        async def read() -> Any:
            args = (key_of(owner, id).hex(), *texts(now, limit_bytes))
            return await self._chain(args=args)

        found = await self._reading.run(read)
        if found == _TOO_LARGE:
            raise body_too_large(limit_bytes)
        return cast("list[bytes] | None", found)

    async def listing(self, owner: str, after: str, limit: int, now: float) -> list[Listed]:
        async def read() -> list[Any]:
            # A blank sorts before "!", so this follows the member of the id `after`.
            args = (owner, f"({after}!" if after else "-", *texts(limit, now))
            return cast("list[Any]", await self._listing(args=args))

        return [
            Listed(id.decode(), about, int(size), float(used), float(expires))
            for id, about, size, used, expires in await self._reading.run(read)
        ]

    async def use(self, owner: str, id: str, now: float) -> None:
        async def renew() -> None:
            tenant = tenant_of(owner)
            args = (key_of(owner, id).hex(), *texts(now), tenant, *texts(_BACKSTOP_S))
            await self._use(args=args)

        await self._writing.tidy(renew)

    async def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        sent_bytes = len(document.items) + len(document.about)
        if sent_bytes > self._limit_bytes:
            return None

        async def write() -> int:
            key, previous = key_of(owner, document.id).hex(), document.continues
            parent = "" if previous is None else key_of(owner, previous).hex()
            size, keep_ms = sent_bytes + _DOCUMENT_BYTES, int((ttl_s + _BACKSTOP_S) * 1000)
            numbers = texts(size, self._limit_bytes, now, ttl_s)
            content = (parent, document.items, document.about)
            listed = (owner, document.id) if document.is_listed else ("", "")
            args = (key, tenant_of(owner), *numbers, *content, *texts(keep_ms), *listed)
            return int(await self._put(args=args))

        evicted = await self._writing.run(write, sent_bytes)
        return None if evicted == _TOO_LARGE else evicted

    async def delete(self, owner: str, id: str, now: float) -> bool:
        async def remove() -> bool:
            return bool(await self._delete(args=(key_of(owner, id).hex(), *texts(now))))

        return await self._writing.run(remove)

    async def sweep(self, now: float) -> int:
        async def remove() -> int:
            return int(await self._sweep(args=texts(now, SWEEP_BATCH)))

        return await self._writing.tidy(remove) or 0

    async def close(self) -> None:
        await self._server.close()


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


# A period is a hash of `r` or `t`, the tenant and the key, divided by NUL, which names cannot have.
_ADD_USAGE = """
local writer = P..'usage-writer:'..ARGV[1]
if tonumber(ARGV[2]) <= tonumber(redis.call('GET', writer) or '-1') then return end
redis.call('SET', writer, ARGV[2], 'EX', 86400)
for at = 4, #ARGV, 5 do
  local key, name = P..'usage:'..ARGV[at], ARGV[at + 1]..'\\0'..ARGV[at + 2]
  redis.call('HINCRBY', key, 'r\\0'..name, ARGV[at + 3])
  redis.call('HINCRBY', key, 't\\0'..name, ARGV[at + 4])
  redis.call('EXPIRE', key, ARGV[3])
end
"""


class RedisUsage:
    """`UsageTable` on a server."""

    def __init__(self, server: RedisServer, failed: Failed) -> None:
        self._server = server
        self._reading = Calls("reading the usage of keys", failed)
        self._writing = Calls("writing the usage of keys", failed)
        self._add = server.script(_ADD_USAGE)

    async def add(self, batch: Batch) -> None:
        words = [str(word) for use in batch.uses for word in use]

        async def call() -> None:
            kept_s = KEPT_DAYS * 86_400
            await self._add(args=(batch.writer, batch.number, kept_s, *words))

        await self._writing.run(call)

    async def read(self, period: str) -> list[Use]:
        async def call() -> list[Use]:
            return await self._read(period)

        return await self._reading.run(call)

    async def days(self, month: str) -> list[Use]:
        async def call() -> list[Use]:
            return [use for day in range(1, 32) for use in await self._read(f"{month}-{day:02}")]

        return await self._reading.run(call)

    async def _read(self, period: str) -> list[Use]:
        found: dict[bytes, bytes] = await self._server.client.hgetall(f"{PREFIX}usage:{period}")
        uses = []
        for field, requests in sorted(found.items()):
            kind, _, name = field.partition(b"\0")
            if kind == b"r":
                tenant, _, key = name.decode().partition("\0")
                tokens = int(found.get(b"t\0" + name, 0))
                uses.append(Use(period, tenant, key, int(requests), tokens))
        return uses
