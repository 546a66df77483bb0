"""What is wrong with a store's server is said at start, in one message without the password."""

import contextlib
import logging
import re
import sys
from pathlib import Path

import pytest

from sgl_ext.balancer.store.documents import StoreUnreachable, StoreUnusable
from sgl_ext.balancer.store.opening import check_store
from sgl_ext.launch import make_children
from sgl_ext.node.hardware import Hardware
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings, SettingsError
from sgl_ext.settings.secrets import read_store
from sgl_ext.settings.sources import balancer_settings
from tests.balancer.store.servers import PASSWORD, Server, free_port

pytestmark = pytest.mark.usefixtures("patient")


def refused(
    monkeypatch: pytest.MonkeyPatch, url: str, kind: type[StoreUnusable] = StoreUnusable
) -> str:
    """The message with which the start ends."""
    monkeypatch.setenv("STORE", url)
    with pytest.raises(kind) as caught:
        check_store("env:STORE", 1)
    message = str(caught.value)
    assert message.startswith("store='env:STORE': ")
    assert PASSWORD not in message
    assert "\n" not in message
    return message


def test_a_wrong_password(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(monkeypatch, server.url(password="wr0ng"))
    assert re.search("refuses this user: .*password", message)
    assert "wr0ng" not in message


async def test_the_launcher_checks_a_server_in_its_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", f"redis://127.0.0.1:{free_port()}")
    balancer = BalancerSettings(port=free_port(), store="env:STORE")
    config = LaunchSettings(model_path="m", log_dir=str(tmp_path), balancer=balancer)
    with pytest.raises(StoreUnreachable, match="store='env:STORE': cannot be reached"):
        make_children(config, Hardware(()))


def test_a_server_that_is_not_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(monkeypatch, server.url(port=free_port()), StoreUnreachable)
    assert "cannot be reached" in message
    nowhere = server.url().replace("127.0.0.1", "no-such-host.invalid")
    assert "cannot be reached" in refused(monkeypatch, nowhere, StoreUnreachable)


@pytest.mark.long
def test_a_server_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("postgres", "redis"):
        monkeypatch.setattr(f"sgl_ext.balancer.store.{module}.WAIT_S", 1.0)
    with server.paused():
        assert "cannot be reached" in refused(monkeypatch, server.url(), StoreUnreachable)


def test_after_a_start_a_server_that_is_away_stops_no_restart(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STORE", server.url(port=free_port()))
    check_store("env:STORE", 1, is_restart=True)
    assert "store='env:STORE': cannot be reached" in caplog.text
    monkeypatch.setenv("STORE", server.url(password="wr0ng"))
    with pytest.raises(StoreUnusable):
        check_store("env:STORE", 1, is_restart=True)


def test_a_database_that_is_not_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, server.url("999" if server.kind == "redis" else "none"))


def test_keys_or_tables_of_another_version(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", server.url())
    check_store("env:STORE", 1)
    check_store("env:STORE", 1)
    if server.kind == "redis":
        import redis

        with contextlib.closing(redis.Redis.from_url(server.url())) as client:
            client.set("sgl-ext:format", "99")
    else:
        import psycopg

        with psycopg.connect(server.url(), autocommit=True) as db:
            db.execute("UPDATE sgl_ext.format SET version = 99")
    assert "belong" in refused(monkeypatch, server.url())


def test_a_schema_of_another_program(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    with psycopg.connect(postgres_server.url(), autocommit=True) as db:
        db.execute("DROP SCHEMA IF EXISTS sgl_ext CASCADE")
        db.execute("CREATE SCHEMA sgl_ext")
    assert "another program" in refused(monkeypatch, postgres_server.url())


def test_a_server_that_would_lose_turns_is_named_in_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STORE", server.url())
    caplog.set_level(logging.WARNING)
    check_store("env:STORE", 1)
    assert not caplog.records
    if server.kind == "redis":
        import redis

        with contextlib.closing(redis.Redis.from_url(server.url())) as client:
            client.config_set("appendonly", "no")
            try:
                check_store("env:STORE", 1)
            finally:
                client.config_set("appendonly", "yes")
    else:
        monkeypatch.setenv("STORE", server.url() + "?options=-csynchronous_commit%3Doff")
        check_store("env:STORE", 1)
    assert len(caplog.records) == 1
    assert re.search("restart loses all|loses the last", caplog.text)
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("redis://:hunter2@host/0", "a password may not stand here"),
        ("postgresql://me:hunter2@host/db", "a password may not stand here"),
        ("postgresql://me@host/db?password=hunter2", "a password may not stand here"),
        ("redis://host/0?password=hunter2", "a password may not stand here"),
        ("redis://:hunter2@host/name", "a password may not"),
        ("redis://host/name", "number of a database"),
        ("redis://", "must be"),
        ("redis://:hunter2@host:port/0", "must be"),
        ("mysql://me:hunter2@host/db", "must be"),
        ("env:NO_SUCH_VARIABLE", "not set"),
        ("file:/no/such/file", "cannot be read"),
    ],
)
def test_a_setting_that_names_no_store(store: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        balancer_settings(["--store", store])
    assert "store=" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_a_setting_names_is_never_shown() -> None:
    address = read_store("env:STORE", {"STORE": "valkeys://me:hunter2@host:1/2"})
    assert (address.kind, address.url) == ("redis", "rediss://me:hunter2@host:1/2")
    assert "hunter2" not in repr(address)
    assert BalancerSettings(store="env:STORE").to_environment().values()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, module, extra, url in (
        ("redis", "redis", "redis", "redis://host"),
        ("psycopg", "postgres", "postgres", "postgresql://host/db"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"sgl_ext.balancer.store.{module}", raising=False)
        with pytest.raises(StoreUnusable, match=rf"needs the package {package}.*\[{extra}\]"):
            check_store(url, 1)
