"""What one key permits: until when, how much at once, and how much in a month."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from sgl_ext import keys
from sgl_ext.balancer.access.usage import Amount, UsageLedger
from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import Batch, Use
from sgl_ext.key_file import ApiKey
from sgl_ext.limits.at_once import SLOTS, RequestsAtOnce
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.conftest import Connect, Engine, Serve, Start
from tests.balancer.wire import Raw, request, until

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
BODY = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}
NOVEMBER = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
DAY_S = 86_400


class Limited:
    """A key of a tenant, with limits, and the requests of its client."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.path = folder / "keys.toml"
        self.key, self.name = keys.add_key(self.path, "alice", **limits)
        self.config = {"keys": str(self.path)}
        self.headers = {"authorization": f"Bearer {self.key}"}

    async def asks(self, client: ClientSession, path: str) -> tuple[int, Any, Any]:
        async with client.post(path, json=BODY, headers=self.headers) as answer:
            return answer.status, orjson.loads(await answer.read()), answer.headers


# Expiry.


async def test_an_expired_key_is_401_in_the_words_of_each_protocol(
    start: Start, tmp_path: Path
) -> None:
    engine = Engine("a")
    key = Limited(tmp_path, expires=datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    client = await start(engine, **key.config)
    status, said, headers = await key.asks(client, MESSAGES)
    message = "This API key expired at 2026-01-02T03:04Z."
    assert (status, said["error"]) == (401, {"type": "authentication_error", "message": message})
    assert headers["x-should-retry"] == "false"
    status, said, _ = await key.asks(client, CHAT)
    assert (status, said["error"]["message"]) == (401, message)
    assert said["error"]["code"] == "invalid_api_key"
    assert engine.seen == []


async def test_a_key_expires_while_its_client_is_connected(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    key = Limited(tmp_path, expires=end)
    balancer = await serve(Raw(), **key.config)
    wire = await connect(balancer)
    line = f"authorization: Bearer {key.key}".encode()
    assert b" 200 " in (await wire.ask(request(b"{}", line)))[0]
    key_file = balancer._basis.key_file
    assert key_file is not None
    key_file.clock = end.timestamp
    balancer.sweep(balancer.now)
    head, body = await wire.ask(request(b"{}", line))
    assert b" 401 " in head
    assert b"This API key expired at" in body


# Requests at once.


@pytest.mark.parametrize(
    ("path", "kind"), [(MESSAGES, "rate_limit_error"), (CHAT, "rate_limit_error")]
)
async def test_a_key_has_so_many_requests_at_once_and_others_are_429(
    start: Start, tmp_path: Path, path: str, kind: str
) -> None:
    go_on = asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({"usage": USAGE})

    engine = Engine("a", wait)
    key = Limited(tmp_path, requests_at_once=2)
    client = await start(engine, **key.config)
    running = [asyncio.create_task(key.asks(client, path)) for _ in range(2)]
    await until(lambda: len(engine.seen) == 2)
    status, said, headers = await key.asks(client, path)
    assert (status, said["error"]["type"]) == (429, kind)
    assert said["error"]["message"] == "This key's limit of 2 requests at once is reached."
    assert headers["retry-after"] == "1"
    go_on.set()
    assert [status for status, *_ in await asyncio.gather(*running)] == [200, 200]
    assert [(await key.asks(client, path))[0] for _ in range(3)] == [200] * 3


async def test_a_request_whose_client_leaves_or_that_fails_makes_room(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    key = Limited(tmp_path, requests_at_once=1)
    worker = Raw([b""], [None], [None])
    balancer = await serve(worker, **key.config)
    line = f"authorization: Bearer {key.key}".encode()
    leaving = await connect(balancer)
    leaving.writer.write(request(b"{}", line))
    await until(lambda: worker.requests)
    leaving.writer.transport.abort()
    at_once = balancer._services.rate_limits.at_once
    await until(lambda: not at_once._running)
    wire = await connect(balancer)
    assert b" 429 " not in (await wire.ask(request(b'{"b":1}', line)))[0]
    assert not at_once._running
    assert not balancer._services.rate_limits.usage._claimed


@pytest.fixture
def memory() -> GroupMemory:
    return GroupMemory(1 << 10)


def test_processes_count_together(memory: GroupMemory) -> None:
    one, two = memory.requests_at_once(0), memory.requests_at_once(1)
    assert [one.enter("a", 3), two.enter("a", 3), two.enter("a", 3)] == [True] * 3
    assert not one.enter("a", 3)
    assert one.enter("b", 1)
    assert not two.enter("b", 1)
    two.leave("a")
    assert one.enter("a", 3)
    # A process that ended is followed by another one with its number.
    again = memory.requests_at_once(0)
    assert [again.enter("a", 3), again.enter("a", 3), again.enter("a", 3)] == [True, True, False]
    assert two.enter("b", 1)


def test_a_full_table_leaves_each_process_its_own_count(memory: GroupMemory) -> None:
    one, two = memory.requests_at_once(0), memory.requests_at_once(1)
    for number in range(SLOTS):
        assert one.enter(f"key-{number}", 1)
    for each in (one, two):
        assert [each.enter("late", 1), each.enter("late", 1)] == [True, False]
    one.leave("key-7")
    one.leave("late")
    two.leave("late")
    assert one.enter("late", 1)
    assert not two.enter("late", 1)
    for number in range(SLOTS):
        if number != 7:
            one.leave(f"key-{number}")
    one.leave("late")
    assert not one._running
    assert not any(one._cells)


def test_one_process_counts_for_itself() -> None:
    alone = RequestsAtOnce()
    assert [alone.enter("a", 1), alone.enter("a", 1), alone.enter("b", 1)] == [True, False, True]
    alone.leave("a")
    assert alone.enter("a", 1)


# Budgets.


class Table:
    """A table of uses in memory, which fails if its test says so. `lost`: it adds, then fails."""

    def __init__(self) -> None:
        self.uses: dict[tuple[str, str, str], Amount] = {}
        self.numbers: dict[str, int] = {}
        self.fails = self.lost = False

    async def add(self, batch: Batch) -> None:
        if self.fails:
            raise StoreFailed
        if batch.number > self.numbers.get(batch.writer, -1):
            self.numbers[batch.writer] = batch.number
            for use in batch.uses:
                self.uses[use[:3]] = self.uses.get(use[:3], Amount()).plus(*use[3:])
        if self.lost:
            raise StoreFailed

    async def read(self, period: str) -> Sequence[Use]:
        if self.fails:
            raise StoreFailed
        return [Use(*at, *amount) for at, amount in self.uses.items() if at[0] == period]

    async def days(self, month: str) -> Sequence[Use]:
        return []


KEY = ApiKey("alice", "0" * 64, tokens_per_month=1000, requests_per_month=5, name="k")


def ledger(table: Any, now_s: float = NOVEMBER) -> UsageLedger:
    return UsageLedger(table, lambda: now_s)


def refusal(of: UsageLedger, key: ApiKey = KEY) -> str:
    try:
        of.require_budget(key)
    except BalancerError as error:
        return error.message
    return ""


async def test_balancers_share_a_budget_and_a_restart_keeps_it() -> None:
    table = Table()
    one, two = ledger(table), ledger(table)
    one.begin(KEY, 0)
    one.count(KEY, 0, 600)
    two.begin(KEY, 0)
    two.count(KEY, 0, 400)
    assert not refusal(one)
    await one.sync()
    await two.sync()
    assert refusal(two) == (
        "This key's budget of 1000 tokens for 2026-11 is used up. The next month begins at "
        "2026-12-01T00:00:00Z."
    )
    await one.sync()
    assert refusal(one) == refusal(two)
    later = ledger(table)
    await later.sync()
    assert later.used(KEY) == (2, 1000)
    assert table.uses["2026-11-28", "alice", "k"] == table.uses["2026-11", "alice", "k"]


async def test_a_new_month_begins_with_a_whole_budget() -> None:
    table, now_s = Table(), NOVEMBER
    spent = UsageLedger(table, lambda: now_s)
    for _ in range(5):
        spent.begin(KEY, 0)
    await spent.sync()
    assert "5 requests" in refusal(spent)
    now_s += 3 * DAY_S
    assert not refusal(spent)
    spent.begin(KEY, 0)
    await spent.sync()
    assert spent.used(KEY) == (1, 0)
    assert table.uses["2026-11", "alice", "k"] == (5, 0)


async def test_what_runs_claims_of_a_budget_until_its_cost_is_known() -> None:
    claims = ledger(Table())
    claims.begin(KEY, 1000)
    assert "1000 tokens" in refusal(claims)
    claims.end(KEY, 1000)
    claims.count(KEY, 0, 10)
    assert not refusal(claims)
    assert claims.used(KEY) == (1, 10)


async def test_a_table_that_fails_loses_nothing_and_counts_nothing_twice() -> None:
    table = Table()
    counted = ledger(table)
    counted.count(KEY, 1, 100)
    table.lost = True
    await counted.sync()  # it was added, and the answer was lost
    assert counted.used(KEY) == (1, 100)
    counted.count(KEY, 1, 100)
    table.lost, table.fails = False, True
    await counted.sync()
    assert counted.used(KEY) == (2, 200)
    table.fails = False
    await counted.sync()
    assert counted.used(KEY) == table.uses["2026-11", "alice", "k"] == (2, 200)


async def test_what_is_counted_during_a_read_is_not_lost() -> None:
    table = Table()
    counted = ledger(table)
    read = table.read

    async def reads(period: str) -> Sequence[Use]:
        found = await read(period)
        counted.count(KEY, 1, 7)
        return found

    counted.count(KEY, 1, 100)
    table.read = reads  # type: ignore[method-assign]
    await counted.sync()
    assert counted.used(KEY) == (2, 107)
    table.read = read  # type: ignore[method-assign]
    await counted.sync()
    assert counted.used(KEY) == (2, 107)


async def test_a_budget_that_ends_is_refused_in_the_words_of_each_protocol(
    start: Start, tmp_path: Path
) -> None:
    async def answers(request: web.Request) -> web.Response:
        return web.json_response({"usage": USAGE})

    engine = Engine("a", answers)
    key = Limited(tmp_path, tokens_per_month=110)
    store = str(tmp_path / "store.sqlite")
    client = await start(engine, store=store, **key.config)
    assert (await key.asks(client, CHAT))[0] == 200
    status, said, headers = await key.asks(client, CHAT)
    error = said["error"]
    assert (status, error["type"], error["code"]) == (429, *["insufficient_quota"] * 2)
    assert "budget of 110 tokens" in error["message"]
    assert headers["x-should-retry"] == "false"
    status, said, headers = await key.asks(client, MESSAGES)
    assert (status, said["error"]["type"]) == (402, "billing_error")
    assert headers["x-should-retry"] == "false"
    assert len(engine.seen) == 1


async def test_a_budget_outlives_its_balancer(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    key = Limited(tmp_path, requests_per_month=2)
    line = f"authorization: Bearer {key.key}".encode()
    store = str(tmp_path / "store.sqlite")
    first = await serve(Raw(), store=store, **key.config)
    wire = await connect(first)
    for _ in range(2):
        assert b" 200 " in (await wire.ask(request(b"{}", line)))[0]
    await first.stop()
    second = await serve(Raw(), store=store, **key.config)
    head, body = await (await connect(second)).ask(request(b"{}", line))
    assert b" 402 " in head
    assert b"2 requests" in body


# The command.


def test_the_list_shows_what_a_key_may_and_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "keys.toml")
    shown: list[str] = []
    limits = ["--requests-at-once", "4", "--tokens-per-month", "1000"]
    keys.main([path, "add", "alice", "--expires", "90d", *limits], shown.append)
    keys.main([path, "add", "bob", "--expires", "2020-01-31"], shown.append)
    keys.main([path, "list"], shown.append)
    alice, bob = shown[2:]
    end = datetime.now(UTC) + timedelta(days=90)
    assert f"expires {end:%Y-%m-%d}" in alice
    assert "4 requests at once  1000 tokens per month" in alice
    assert "expired 2020-01-31" in bob
    for wrong in (["--expires", "soon"], ["--requests-at-once", "0"], ["--tokens-per-month", "x"]):
        with pytest.raises(SystemExit):
            keys.main([path, "add", "carol", *wrong], shown.append)
    assert "carol" not in (tmp_path / "keys.toml").read_text()


def test_a_file_s_limits_of_keys_are_checked_by_name(tmp_path: Path) -> None:
    text = f'[keys.0a1b2c3d]\ntenant = "a"\nsha256 = "{os.urandom(32).hex()}"\n'
    for line, error in (
        ('expires = "2027-01-01"', "keys.0a1b2c3d.expires: must be a date"),
        ("requests_at_once = 0", "keys.0a1b2c3d.requests_at_once"),
        ("tokens_per_month = -1", "keys.0a1b2c3d.tokens_per_month"),
        ('name = "x"', "keys.0a1b2c3d.name: is not a field"),
    ):
        with pytest.raises(keys.KeysError, match=error):
            keys.parse_keys(text + line)
    (key,) = keys.parse_keys(text + "expires = 2027-01-01").by_hash.values()
    assert key.expires_s == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
