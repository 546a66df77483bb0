"""The source of workers that is a fleet on Ray, without a cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from sgl_ext_cpu.node import ROOT

from sgl_ext.membership.member import Member, MembershipError
from sgl_ext.membership.sources import open_source

pytest.importorskip("ray")

from sgl_ext.integrations.ray import source as ray_source
from sgl_ext.integrations.ray.source import GONE_S, RENEWED_S, Entry, RayFleet, Renewals, decoded


class Table:
    """Ray's GCS: what the actors have written, for each look one table, then an outage."""

    def __init__(self, *tables: dict[str, Entry]) -> None:
        self._tables = iter(tables)

    async def below(self, prefix: str) -> dict[str, bytes]:
        assert prefix == "agents/engines/"
        for table in self._tables:
            return {name: msgspec.json.encode(entry) for name, entry in table.items()}
        raise MembershipError("it does not answer")


def entry(renewal: int, member: Member | None, **more: object) -> Entry:
    return Entry(member=member, node="n", generation=0, settings="", renewal=renewal, **more)  # type: ignore[arg-type]


A = Member(id="engine-0-a", url="http://10.0.0.1:20000", model="m", labels={"node": "n"})
B = Member(id="engine-0-b", url="http://10.0.0.2:20000", model="m", labels={"node": "o"})


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("", 0)) as server:  # Ray uses the machine's own address
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def lists(
    monkeypatch: pytest.MonkeyPatch, listener: str, *tables: dict[str, Entry]
) -> list[tuple[Member, ...]]:
    async def connect(_: str) -> Table:
        return Table(*tables)

    monkeypatch.setattr(ray_source.Gcs, "connect", connect)
    monkeypatch.setattr(ray_source, "_POLL_S", 0)
    found = []
    try:
        async for members in RayFleet(f"ray:{listener}/agents", f"{listener}/agents").lists():
            found.append(members)
    except MembershipError:  # the table's outage, at the end
        pass
    return found


async def test_a_list_comes_at_once_and_after_each_change(
    monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    draining = msgspec.structs.replace(B, state="draining")
    found = await lists(
        monkeypatch,
        listener,
        {},
        {"engine-0": entry(1, A)},
        {"engine-0": entry(2, A)},
        {"engine-0": entry(3, None)},
        {"engine-0": entry(1, B)},
        {"engine-0": entry(2, draining)},
    )
    assert found == [(), (A,), (), (B,), (draining,)]


def test_an_entry_of_a_dead_actor_counts_for_a_while_only() -> None:
    renewals = Renewals()
    assert renewals.alive({"a": b"1", "b": b"1"}, 0) == {"a": b"1", "b": b"1"}
    assert renewals.alive({"a": b"2", "b": b"1"}, GONE_S - 1) == {"a": b"2", "b": b"1"}
    assert renewals.alive({"a": b"2", "b": b"1"}, GONE_S) == {"a": b"2"}
    # It was only late: it counts again.
    assert renewals.alive({"a": b"2", "b": b"2"}, GONE_S + 1) == {"a": b"2", "b": b"2"}
    assert renewals.alive({}, GONE_S + 2) == {}
    assert GONE_S >= 3 * RENEWED_S


def test_a_malformed_entry_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    good = entry(1, A)
    found = decoded({"engine-0": b"{", "engine-1": msgspec.json.encode(good)})
    assert found == {"engine-1": good}
    assert "engine-0" in caplog.text
    caplog.clear()
    decoded({"engine-0": b"{"})
    assert caplog.text == ""  # it was logged


def test_a_state_in_words() -> None:
    assert entry(1, None).state == "starts again on n"
    assert entry(1, A).state == "starting at http://10.0.0.1:20000"
    assert entry(1, A, ready=True).state == "ready at http://10.0.0.1:20000"
    drains = msgspec.structs.replace(A, state="draining")
    assert entry(1, drains, ready=True).state == "draining at http://10.0.0.1:20000"


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("127.0.0.1:1", "no Ray cluster listens at .*:1: Connection refused"),
        ("nonsense", "must be auto or HOST:PORT"),
        ("127.0.0.1:port", "must be auto or HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(where: str, problem: str) -> None:
    with pytest.raises(MembershipError, match=problem):
        open_source(f"ray:{where}")


def test_without_the_extra_the_message_names_it() -> None:
    program = """
import sys
sys.modules["ray"] = None
from sgl_ext.membership.sources import open_source
try:
    open_source("ray:auto")
except Exception as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("MembershipError ray")
    assert ended.stdout.endswith("is not installed: pip install 'sgl-ext[ray]'\n")
