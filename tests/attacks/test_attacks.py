"""Each attack gets its status, and the balancer's memory and event loop stay within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import requests

from sgl_ext.limits.bounds import MAX_TOOLS
from tests.attacks.cases import (
    CASES,
    CONTEXTS,
    FRAMES,
    HANDSHAKE,
    MESSAGES,
    Case,
    context_of,
    post,
)
from tests.attacks.target import Target, sample, target
from tests.waiting import until

pytestmark = pytest.mark.long

MEMORY_KB = 240 * 1024
# On a quiet machine no attack stalls the loop for 50 ms. A busy one computes at half its speed or
# less, and an attack that nothing bounds takes seconds.
STALL_S = 0.25


@pytest.fixture(scope="module")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("attacks") / "log") as attacked:
        yield attacked


@pytest.mark.xdist_group("attacks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_attack_is_answered_within_the_bounds(balancer: Target, case: Case) -> None:
    data = case.data()
    stalls = balancer.stalls(STALL_S)
    try:
        if case.status is None:
            for connection in [balancer.connect() for _ in range(case.times)]:
                connection.sendall(data)
        else:
            assert {balancer.send(data) for _ in range(case.times)} == {case.status}
        assert requests.get(f"{balancer.url}/health", timeout=60).status_code == 200
    finally:
        balancer.hang_up()
    until(lambda: sample(balancer.page(), "sgl_ext_connections") <= 1)
    assert balancer.stalls(STALL_S) == stalls
    assert balancer.peak_kb() - balancer.idle_kb <= MEMORY_KB


@pytest.mark.xdist_group("attacks")
@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_a_websocket_stay_within_the_bounds(balancer: Target, name: str) -> None:
    stalls = balancer.stalls(STALL_S)
    connection = balancer.connect()
    connection.sendall(HANDSHAKE)
    assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")
    connection.settimeout(10)  # it is not read while its own answers are not
    with suppress(OSError):
        connection.sendall(FRAMES[name]())
    assert requests.get(f"{balancer.url}/health", timeout=60).status_code == 200
    balancer.hang_up()
    until(lambda: sample(balancer.page(), "sgl_ext_websockets") == 0)
    assert balancer.stalls(STALL_S) == stalls
    assert balancer.peak_kb() - balancer.idle_kb <= MEMORY_KB


@pytest.mark.xdist_group("attacks")
def test_naming_the_largest_context_is_cheap(balancer: Target) -> None:
    stalls = balancer.stalls(STALL_S)
    tool = b'{"name":"x","input_schema":{"type":"object"}}'
    json = {"content-type": "application/json"}
    url, context = balancer.url + CONTEXTS, context_of(tool, MAX_TOOLS)
    id = requests.post(url, data=context, headers=json, timeout=60).json()["context_id"]
    body = b'{"model":"m","max_tokens":1,"messages":[],"context_id":"%b"}' % id.encode()
    assert {balancer.send(post(MESSAGES, body)) for _ in range(5)} == {200}
    assert balancer.stalls(STALL_S) == stalls


@pytest.mark.xdist_group("attacks")
def test_nothing_is_held_after_the_attacks(balancer: Target) -> None:
    assert sample(balancer.page(), "sgl_ext_held_bytes") == 0
