"""Documents in Redis or Valkey. Each method is one Lua script, and so one round trip and atomic.

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
"""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import Calls
from sgl_ext.balancer.store.documents import (
    LONGEST_CHAIN,
    SWEEP_BATCH,
    Document,
    Found,
    Listed,
    key_of,
    tenant_of,
)
from sgl_ext.balancer.store.redis_server import RedisServer, texts
from sgl_ext.protocols.errors import body_too_large

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
