"""The three kinds of stores, on real servers that start once a session."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import Calls
from sgl_ext.balancer.store.documents import Documents
from sgl_ext.balancer.store.opening import check_store, open_store
from sgl_ext.balancer.store.shared_state import SharedState
from sgl_ext.balancer.store.sqlite import StoreThread
from tests.balancer.store.servers import Postgres, Redis, Server, running
from tests.waiting import HANG_S


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    with running(Redis) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    with running(Postgres) as server:
        yield server


def emptied(server: Server) -> Server:
    """A server without our keys and tables."""
    if server.kind == "redis":
        import redis

        with contextlib.closing(redis.Redis.from_url(server.url())) as client:
            client.flushall()
    else:
        import psycopg

        with psycopg.connect(server.url(), autocommit=True) as db:
            db.execute("SET lock_timeout = '5s'")
            db.execute("DROP SCHEMA IF EXISTS sgl_ext CASCADE")
    return server


@pytest.fixture(
    params=[
        pytest.param("redis_server", id="redis"),
        pytest.param("postgres_server", id="postgresql"),
    ]
)
def server(request: pytest.FixtureRequest) -> Server:
    """Each server, empty."""
    return emptied(request.getfixturevalue(request.param))


@pytest.fixture(params=["sqlite", "redis_server", "postgres_server"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The setting of each kind of store, which is empty."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    return named(emptied(request.getfixturevalue(request.param)), monkeypatch)


def named(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The setting of a server's store, checked as at start."""
    monkeypatch.setenv("STORE", server.url())
    check_store("env:STORE", 1)
    return "env:STORE"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call ends because the machine is slow."""
    for waits in (Calls, StoreThread):
        parameters = inspect.signature(waits.__init__).parameters.values()
        defaults = [
            HANG_S if one.name == "wait_s" else one.default
            for one in parameters
            if one.default is not one.empty
        ]
        monkeypatch.setattr(waits.__init__, "__defaults__", tuple(defaults))
    names = ("postgres.WAIT_S", "postgres.CALL_S", "redis.WAIT_S", "redis.CALL_S")
    for name in (*names, "sqlite.BUSY_S"):
        monkeypatch.setattr(f"sgl_ext.balancer.store.{name}", HANG_S)


Shorten = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def shortened(patient: None, monkeypatch: pytest.MonkeyPatch) -> Shorten:
    """Makes calls of all stores that are open end within a moment, while in its block."""
    opened: list[Calls] = []
    make = Calls.__init__

    def note(calls: Calls, *args: Any, **kw: Any) -> None:
        make(calls, *args, **kw)
        opened.append(calls)

    monkeypatch.setattr(Calls, "__init__", note)

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        for calls in opened:
            calls._wait_s = 0.25
        yield
        for calls in opened:
            calls._wait_s = HANG_S

    return block


Open = Callable[..., Documents]
Share = Callable[[], SharedState]


@pytest.fixture
async def opened(place: str, patient: None) -> AsyncIterator[Open]:
    """Opens connections to one store, as several balancers do."""
    async with contextlib.AsyncExitStack() as stack:

        def begin(limit_bytes: int = 4 << 20) -> Documents:
            documents = open_store(place, limit_bytes, Metrics(), None).documents
            assert documents is not None
            stack.push_async_callback(documents.close)
            return documents

        yield begin


@pytest.fixture
def setting(server: Server, patient: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The setting of each server's store."""
    return named(server, monkeypatch)


@pytest.fixture
async def shared(setting: str, patient: None) -> AsyncIterator[Share]:
    """Opens what the balancers of a server share."""
    async with contextlib.AsyncExitStack() as stack:

        def begin() -> SharedState:
            state = open_store(setting, 0, Metrics(), None).shared
            assert state is not None
            stack.push_async_callback(state.close)
            return state

        yield begin
