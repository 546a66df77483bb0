"""A prefill and a decode engine, both real, behind a balancer. SGLang hands the KV over by TCP.

Needs two of Debian's libraries, which mooncake loads (launch/cpu/README.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from sgl_ext_cpu.node import free_port, running_balancer
from sgl_ext_cpu.nursery import Nursery

from tests.debian import require_debian
from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.waiting import HANG_S, until

TEXT = "The agent reads a file and then writes what it found. " * 30
PATH = "/v1/messages"


class Node(NamedTuple):
    url: str
    prefill: Engine
    decode: Engine
    alone: Engine

    def get(self, path: str) -> Any:
        return requests.get(self.url + path, timeout=HANG_S).json()


@pytest.fixture(scope="module")
def node(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """A balancer over a prefill and a decode engine, and an engine alone to compare with."""
    require_debian(_mooncake_loads, "libibverbs1", "libnl-route-3-200")
    folder = tmp_path_factory.mktemp("roles")
    transfer = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-mode")
    ports = ("--disaggregation-bootstrap-port", str(free_port()))
    with ExitStack() as stack:
        start = stack.enter_context

        def engine(name: str, *flags: str) -> Engine:
            return start(running_engine(nursery, tiny_model, folder / f"{name}.log", *flags))

        prefill = engine("prefill", *transfer, "prefill", *ports)
        decode = engine("decode", *transfer, "decode")
        alone = engine("alone")
        workers = (prefill.url, decode.url)
        balancer = start(running_balancer(workers, folder / "balancer.log"))
        yield Node(balancer.url, prefill, decode, alone)


def _mooncake_loads() -> bool:
    command = [sys.executable, "-c", "import mooncake.engine"]
    return subprocess.run(command, capture_output=True).returncode == 0


def ask(url: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": messages, **more}
    answer = requests.post(url + PATH, json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer


def turns(number: int) -> list[dict[str, Any]]:
    marked = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [marked]}]
    for turn in range(number):
        messages += [{"role": "assistant", "content": "ok"}]
        messages += [{"role": "user", "content": f"go on {turn}"}]
    return messages


def test_the_balancer_knows_their_roles(node: Node) -> None:
    rows = node.get("/sgl_ext/workers")["workers"]
    assert [row["role"] for row in rows] == ["prefill", "decode"]
    until(lambda: node.get("/sgl_ext/workers")["workers"][0]["publishes_prefixes"])


def test_a_conversation_is_answered_as_by_one_engine_and_read_from_the_prefill_cache(
    node: Node,
) -> None:
    for number in range(3):
        answer = ask(node.url, turns(number)).json()
        alone = ask(node.alone.url, turns(number)).json()
        assert answer["content"] == alone["content"]
        read = answer["usage"]["cache_read_input_tokens"]
        assert read == alone["usage"]["cache_read_input_tokens"]
        assert bool(read) is bool(number)


def test_what_is_marked_is_pinned_at_the_prefill_engine(node: Node) -> None:
    ask(node.url, turns(0))
    until(lambda: node.get("/v1/pins")["pins"])
    (pin,) = node.get("/v1/pins")["pins"]
    assert pin["worker"] == node.prefill.url


def test_a_stream_comes_from_the_decode_engine(node: Node) -> None:
    answer = ask(node.url, turns(1), stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    assert events[-1]["type"] == "message_stop"
    assert events[-2]["usage"]["output_tokens"] == 8


def test_tokens_are_counted_without_a_decode_engine(node: Node) -> None:
    body = {"model": "tiny", "messages": turns(0)}
    counted = requests.post(f"{node.url}{PATH}/count_tokens", json=body, timeout=HANG_S).json()
    assert counted["input_tokens"] > 300


def test_several_samples_are_rejected_by_name(node: Node) -> None:
    body = {"model": "tiny", "n": 2, "messages": [{"role": "user", "content": "Hello"}]}
    answer = requests.post(f"{node.url}/v1/chat/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 400
    assert "n: must be 1" in answer.json()["error"]["message"]


def test_a_wrong_request_is_answered_once(node: Node) -> None:
    answer = requests.post(node.url + PATH, json={"model": "tiny", "messages": 7}, timeout=HANG_S)
    assert answer.status_code == 400
    assert ask(node.url, turns(0)).json()["usage"]["output_tokens"] == 8
