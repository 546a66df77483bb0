"""Requests that end or freeze the engine that runs them, and the node around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from itertools import count
from threading import Event
from typing import Any

import dill
import pytest
import requests
from sgl_ext_cpu.engine_processes import find_engine
from sgl_ext_cpu.gate import Gate
from sgl_ext_cpu.node import Node, StartNode

from tests.waiting import HANG_S, until

GENERATE = "/generate"


def processor(statement: str) -> str:
    """A logit processor, which SGLang runs in its scheduler; here it does what a bug may do."""
    code = f"""
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
class Harm(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        import os, time
        {statement}
"""
    names: dict[str, Any] = {"__name__": "__main__"}  # so that the code goes along
    exec(code, names)
    return json.dumps({"callable": dill.dumps(names["Harm"]).hex()})


ENDS = processor("os.kill(os.getpid(), 9)")
FREEZES = processor("while True: time.sleep(1)")


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """The gate before each step of both engines."""
    with Gate() as gate:
        yield gate


@pytest.fixture(scope="module")
def pair(
    start_node: StartNode, gate: Gate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """Two engines that run what a request brings."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ("--instances", "2", "--enable-custom-logit-processor")
    with start_node(folder, *flags, environment=gate.environment) as started:
        yield started


def body(text: str, harm: str | None = None, tokens: int = 4) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": text, "sampling_params": sampling, "custom_logit_processor": harm}


def impatient(node: Node, asked: dict[str, Any]) -> requests.Response:
    """The answer to a client with less patience than a hang takes to be found."""
    return requests.post(node.url + GENERATE, json=asked, timeout=2)


@contextmanager
def left_alone(node: Node, asked: dict[str, Any]) -> Iterator[None]:
    """Sends a request, whose client leaves at the end of the block."""
    client = HTTPConnection(node.url.removeprefix("http://"))
    client.request("POST", GENERATE, json.dumps(asked), {"content-type": "application/json"})
    yield
    client.close()


def workers(node: Node) -> list[dict[str, Any]]:
    health = requests.get(f"{node.url}/health", timeout=HANG_S).json()
    found: list[dict[str, Any]] = health["workers"]
    return found


def all_ready(node: Node) -> bool:
    return [worker["state"] for worker in workers(node)] == ["ready", "ready"]


def starts(node: Node) -> int:
    """How often engines were started, without the first start of each."""
    state = requests.get(f"{node.url}/sgl_ext/workers", timeout=HANG_S).json()["workers"]
    names = [worker["id"].partition("@")[0] for worker in state]
    return sum(int(name.partition(".")[2] or 1) - 1 for name in names)


def suspects(node: Node, result: str) -> int:
    """How many requests were suspected, cleared, convicted or refused."""
    page = requests.get(f"{node.url}/metrics", timeout=HANG_S).text
    name = f'sgl_ext_suspect_requests_total{{result="{result}"}}'
    found = [line for line in page.splitlines() if line.startswith(name)]
    return int(float(found[0].rpartition(" ")[2])) if found else 0


def asks(node: Node, ended: Event) -> list[int]:
    """The statuses that another client gets, one request after the other."""
    statuses = []
    while not ended.is_set():
        answer = node.post(GENERATE, body(f"other {len(statuses)}"))
        statuses.append(answer.status_code)
    return statuses


def test_a_request_that_ends_engines_ends_two_and_never_the_last(pair: Node) -> None:
    until(lambda: all_ready(pair))
    before, ended = starts(pair), Event()
    with ThreadPoolExecutor(3) as pool:
        other = pool.submit(asks, pair, ended)
        try:
            poison = pool.submit(pair.post, GENERATE, body("poison", ENDS))
            until(lambda: suspects(pair, "suspected") == 1)
            again = pool.submit(pair.post, GENERATE, body("poison", ENDS))  # a client's own retry
            answers = [poison.result(), again.result()]
            until(lambda: starts(pair) - before == 2 and all_ready(pair))
        finally:
            ended.set()
    assert sorted(answer.status_code for answer in answers) == [400, 502]
    assert set(other.result()) == {200}, "the other client saw nothing of it"
    assert (suspects(pair, "convicted"), suspects(pair, "refused")) == (1, 1)
    refused = pair.post(GENERATE, body("poison", ENDS))
    assert refused.status_code == 400
    assert "Two engines ended while they ran this request" in refused.text
    assert refused.headers["x-should-retry"] == "false"
    assert pair.post(GENERATE, body("something else")).status_code == 200
    assert starts(pair) - before == 2


def test_new_requests_go_elsewhere_while_an_engine_is_frozen_and_clients_leave(
    pair: Node, gate: Gate
) -> None:
    until(lambda: all_ready(pair))

    def stalled() -> list[str]:
        return [worker["url"] for worker in workers(pair) if worker["state"] == "stalled"]

    def come_and_go() -> None:
        for number in count():
            if ended.is_set():
                return
            with suppress(requests.exceptions.ReadTimeout):
                impatient(pair, body(f"client {number}"))

    at = gate.mark()
    with left_alone(pair, body("freezes", FREEZES)):
        gate.count(1, "step", at)
    ended = Event()
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(come_and_go)
        try:
            until(lambda: bool(stalled()))
            (url,) = stalled()
            later = [pair.post(GENERATE, body(f"later {n}")) for n in range(20)]
        finally:
            ended.set()
        clients.result()
    assert {answer.status_code for answer in later} == {200}
    find_engine(url).scheduler.kill()  # sooner than the launcher would
    until(lambda: all_ready(pair))
