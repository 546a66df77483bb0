"""What every store promises: SQLite, Redis and PostgreSQL pass the same tests."""

import asyncio
import contextlib
from random import Random

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import Document, Documents, Found, Listed
from sgl_ext.balancer.store.opening import open_store
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.store.conftest import Open, emptied, named
from tests.balancer.store.servers import Server

_MIB = 1 << 20


def turn(id: str, continues: str | None = None, size: int = 10) -> Document:
    return Document(id, id.encode() * size, b"about " + id.encode(), continues)


async def put(store: Documents, owner: str, id: str, size: int, now: float) -> int | None:
    return await store.put(owner, Document(id, b"x" * size, b"about"), 1e6, now)


async def test_a_document_is_found_by_every_connection_and_after_they_end(opened: Open) -> None:
    first, second = opened(), opened()
    document = Document("r1", bytes(range(256)) * 1000, b"about", "r0")
    assert await first.put("k a", document, 60.0, 100.0) == 0
    found = await second.get("k a", "r1", 100.0)
    assert found == Found(bytes(range(256)) * 1000, b"about", 160.0)
    await first.close()
    await second.close()
    assert await opened().get("k a", "r1", 159.9) == found


async def test_owners_cannot_read_or_delete_each_others_documents(opened: Open) -> None:
    store = opened()
    await store.put("k a", turn("r1"), 60.0, 0.0)
    assert await store.get("k b", "r1", 0.0) is None
    assert await store.get("other a", "r1", 0.0) is None
    assert await store.chain("k b", "r1", 0.0, _MIB) is None
    assert not await store.delete("k b", "r1", 0.0)
    await store.put("k b", turn("r1", size=1), 60.0, 0.0)
    assert await store.chain("k a", "r1", 0.0, _MIB) == [b"r1" * 10]
    await store.put("k b", turn("r2", "r1"), 60.0, 0.0)
    assert await store.chain("k b", "r2", 0.0, _MIB) == [b"r1", b"r2" * 10]


async def test_a_list_has_an_owners_listed_documents_in_pages(opened: Open) -> None:
    store = opened()
    for number in range(5):
        document = Document(f"c{number}", b"x" * 9000, b"about %d" % number, is_listed=True)
        await store.put("k a b", document, 60.0, float(number))
    await store.put("k a b", turn("c9"), 60.0, 0.0)
    await store.put("k b", Document("c7", b"x", b"", is_listed=True), 60.0, 0.0)
    first = await store.listing("k a b", "", 2, 5.0)
    assert first == [
        Listed("c0", b"about 0", 9000, 0.0, 60.0),
        Listed("c1", b"about 1", 9000, 1.0, 61.0),
    ]
    await store.delete("k a b", "c1", 5.0)  # the next page begins after it all the same
    rest = [each.id for each in await store.listing("k a b", "c1", 9, 5.0)]
    assert rest == ["c2", "c3", "c4"]
    again = Document("c2", b"y", b"new", is_listed=True)
    await store.put("k a b", again, 60.0, 50.0)
    assert await store.listing("k a b", "", 9, 63.5) == [
        Listed("c2", b"new", 1, 50.0, 110.0),
        Listed("c4", b"about 4", 9000, 4.0, 64.0),
    ]
    assert [each.id for each in await store.listing("k b", "", 9, 5.0)] == ["c7"]
    assert await store.sweep(63.5) == 4
    assert [each.id for each in await store.listing("k a b", "", 9, 0.0)] == ["c2", "c4"]
    assert await store.listing("k c", "", 9, 5.0) == []


async def test_a_chain_is_complete_or_unknown(opened: Open) -> None:
    store = opened()
    for id, continues in (("r1", None), ("r2", "r1"), ("r3", "r2"), ("other", "r1")):
        await store.put("k a", turn(id, continues), 60.0, 0.0)
    assert await store.chain("k a", "r3", 0.0, _MIB) == [b"r1" * 10, b"r2" * 10, b"r3" * 10]
    assert await store.chain("k a", "other", 0.0, _MIB) == [b"r1" * 10, b"other" * 10]
    assert await store.delete("k a", "r2", 0.0)
    assert await store.chain("k a", "r3", 0.0, _MIB) is None
    assert await store.chain("k a", "other", 0.0, _MIB) == [b"r1" * 10, b"other" * 10]


async def test_a_circular_chain_is_unknown(opened: Open) -> None:
    store = opened()
    await store.put("k a", turn("r1"), 60.0, 0.0)
    await store.put("k a", turn("r2", "r1"), 60.0, 0.0)
    await store.put("k a", turn("r1", "r2"), 60.0, 0.0)
    assert await store.chain("k a", "r2", 0.0, _MIB) is None


async def test_a_chain_over_the_size_limit_is_not_read(opened: Open) -> None:
    store = opened()
    await store.put("k a", turn("r1"), 60.0, 0.0)
    await store.put("k a", turn("r2", "r1"), 60.0, 0.0)
    assert await store.chain("k a", "r2", 0.0, 40) is not None
    with pytest.raises(BalancerError, match="larger than"):
        await store.chain("k a", "r2", 0.0, 39)


async def test_a_use_renews_the_whole_chain(opened: Open) -> None:
    store = opened()
    await store.put("k a", turn("r1"), 60.0, 0.0)
    await store.put("k a", turn("r2", "r1"), 60.0, 50.0)
    await store.use("k a", "r2", 59.0)
    assert await store.chain("k a", "r2", 118.9, _MIB) is not None
    assert await store.chain("k a", "r2", 119.0, _MIB) is None


async def test_an_expired_document_is_unknown_before_it_is_swept(opened: Open) -> None:
    store = opened()
    for number in range(100):
        await store.put("k a", turn(f"r{number}"), 10.0, 0.0)
    await store.put("k a", turn("kept"), 60.0, 0.0)
    assert await store.get("k a", "r1", 10.0) is None
    assert not await store.delete("k a", "r1", 10.0)
    assert await store.sweep(9.0) == 0
    swept = [await store.sweep(10.0) for _ in range(3)]
    assert sum(swept) == 100
    assert swept[-1] == 0
    assert await store.get("k a", "kept", 10.0) is not None


async def test_ids_of_any_characters_are_ids(opened: Open) -> None:
    store = opened()
    for id in ("a\0b", "\ud800"[:0] + "ü" * 300, "a b\n*?[x]"):
        await store.put("k a", turn(id), 60.0, 0.0)
        found = await store.get("k a", id, 0.0)
        assert found is not None
        assert found.items == id.encode() * 10
        assert await store.chain("k a", id + "\0", 0.0, _MIB) is None


async def test_beyond_the_limit_the_least_recently_used_is_evicted(opened: Open) -> None:
    store = opened(limit_bytes=_MIB)
    for number in range(4):
        await store.put("k a", turn(f"r{number}", size=100_000), 1e6, float(number))
    await store.use("k a", "r0", 11_000.0)
    assert await store.put("k a", turn("new", size=110_000), 1e6, 11_001.0)
    assert await store.get("k a", "r1", 11_002.0) is None
    assert await store.get("k a", "new", 11_002.0) is not None


async def test_a_document_larger_than_the_store_evicts_nothing(opened: Open) -> None:
    store = opened(limit_bytes=_MIB)
    await store.put("k a", turn("r1"), 60.0, 0.0)
    assert await store.put("k a", Document("large", b"x" * (_MIB + 1), b""), 60.0, 0.0) is None
    # It fits alone, but not together with what every document needs.
    assert await store.put("k a", Document("large", b"x" * (_MIB - 100), b""), 60.0, 0.0) is None
    assert await store.get("k a", "r1", 0.0) is not None
    assert await store.get("k a", "large", 0.0) is None


async def test_a_tenant_that_fills_the_store_evicts_its_own(opened: Open) -> None:
    store = opened()
    for number in range(3):
        await put(store, "contexts ben", f"b{number}", 300_000, float(number))
    evicted = [
        await put(store, "contexts ann", f"a{number}", 400_000, 100.0 + number)
        for number in range(30)
    ]
    assert None not in evicted
    assert sum(filter(None, evicted)) > 15
    for number in range(3):
        assert await store.get("contexts ben", f"b{number}", 200.0) is not None
    assert await store.get("contexts ann", "a29", 200.0) is not None


async def test_a_tenant_within_its_share_gets_room_from_the_one_that_holds_most(
    opened: Open,
) -> None:
    store = opened()
    for number in range(9):
        await put(store, "responses ann", f"a{number}", 400_000, 1000.0 + number)
    await put(store, "contexts cat", "c", 200_000, 0.0)
    for number in range(4):
        assert await put(store, "contexts ben", f"b{number}", 300_000, 1.0) is not None
    assert await store.get("contexts cat", "c", 2000.0) is not None, "the oldest, but within"
    for number in range(4):
        assert await store.get("contexts ben", f"b{number}", 2000.0) is not None
    assert await store.get("responses ann", "a0", 2000.0) is None


async def test_a_tenant_s_kinds_of_documents_count_together(opened: Open) -> None:
    store = opened()
    for number in range(4):
        await put(store, "contexts ben", f"b{number}", 400_000, 0.0)
    for number in range(9):
        kind = ("contexts", "responses", "background")[number % 3]
        await put(store, f"{kind} ann", f"a{number}", 400_000, 1.0 + number)
    for number in range(4):
        assert await store.get("contexts ben", f"b{number}", 10.0) is not None
    assert await store.get("contexts ann", "a0", 10.0) is None


async def test_a_document_beyond_its_tenant_s_share_of_a_full_store_evicts_nothing(
    opened: Open,
) -> None:
    store = opened()
    for number in range(4):
        await put(store, "contexts ben", f"b{number}", 400_000, 0.0)
    assert await put(store, "contexts ann", "a", 3_000_000, 1.0) is None
    for number in range(4):
        assert await store.get("contexts ben", f"b{number}", 1.0) is not None
    assert await put(store, "contexts ann", "a", 1_000_000, 1.0) is not None


async def test_what_is_replaced_deleted_or_expired_counts_no_more(opened: Open) -> None:
    store = opened(limit_bytes=_MIB)
    for number in range(20):
        assert await put(store, "k a", "same", 600_000, float(number)) == 0
    await put(store, "k a", "same", 1, 20.0)
    for number in range(5):
        assert await put(store, "k a", f"r{number}", 600_000, 20.0) == 0
        assert await store.delete("k a", f"r{number}", 20.0)
    for number in range(5):
        document = Document(f"s{number}", b"x" * 600_000, b"")
        assert await store.put("k a", document, 10.0, 100.0 * number) == 0
        assert await store.sweep(100.0 * number + 50) == 1
    assert await store.get("k a", "same", 600.0) is not None


async def test_a_store_does_what_a_dictionary_would(opened: Open) -> None:
    """As long as nothing has to go."""
    stores, random, now = [opened(), opened()], Random(7), 0.0
    known: dict[str, tuple[str | None, float, float]] = {}

    def chain(id: str | None) -> list[bytes] | None:
        found: list[str] = []
        while id is not None:
            if id not in known or known[id][2] <= now or id in found:
                return None
            found.insert(0, id)
            id = known[id][0]
        return [each.encode() for each in found]

    for _ in range(100):
        store, id, act = random.choice(stores), str(random.randrange(6)), random.random()
        if act < 0.4:
            continues, ttl_s = random.choice([None, *"012345"]), float(random.randint(1, 20))
            document = Document(id, id.encode(), b"", continues)
            await store.put("k a", document, ttl_s, now)
            known[id] = (continues, ttl_s, now + ttl_s)
        elif act < 0.6:
            await store.use("k a", id, now)
            for each in chain(id) or ():
                continues, ttl_s, _ = known[each.decode()]
                known[each.decode()] = (continues, ttl_s, now + ttl_s)
        elif act < 0.7:
            there = id in known and known[id][2] > now
            assert await store.delete("k a", id, now) == there
            known.pop(id, None)
        elif act < 0.9:
            now += random.randint(1, 8)
        else:
            await store.sweep(now)
        for each in map(str, random.sample(range(6), 2)):
            assert await random.choice(stores).chain("k a", each, now, _MIB) == chain(each)


async def test_the_account_of_a_redis_is_that_of_its_documents(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    await asyncio.to_thread(named, emptied(redis_server), monkeypatch)
    store, shared, _ = open_store("env:STORE", 300_000, Metrics(), None)
    assert store is not None
    assert shared is not None
    random = Random(7)
    for step in range(300):
        owner = f"{random.choice('rc')} {random.choice(['ann', 'b c', ''])}"
        id, now = f"d{random.randrange(30)}", float(step)
        if random.random() < 0.8:
            document = Document(id, b"x" * random.randrange(30_000), b"y" * random.randrange(9))
            await store.put(owner, document, random.choice([20.0, 1e6]), now)
        elif random.random() < 0.5:
            await store.delete(owner, id, now)
        else:
            await store.sweep(now)
    await store.close()
    await shared.close()
    with contextlib.closing(redis.Redis.from_url(redis_server.url())) as client:
        sizes = client.hgetall("sgl-ext:sizes")
        held = {name: int(size) for name, size in client.hgetall("sgl-ext:held").items()}
        counted = dict.fromkeys(held, 0)
        for key, note in sizes.items():
            size, _, tenant = note.partition(b" ")
            items, about = client.hmget(b"sgl-ext:doc:" + key, "i", "a")
            assert int(size) == 256 + len(items) + len(about)
            counted[tenant] += int(size)
        assert counted == held
        assert sum(held.values()) == int(client.get("sgl-ext:total")) <= 300_000
        assert client.zcard("sgl-ext:expiry") == len(sizes)
        uses = sum(client.zcard(b"sgl-ext:use:" + tenant) for tenant in held)
        assert uses == len(sizes) > 10
