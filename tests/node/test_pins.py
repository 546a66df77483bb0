"""Pins on two real engines behind the balancer: they hold, and requests find them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any
from urllib.parse import quote

import pytest
import requests
from sgl_ext_cpu.node import Node, StartNode

from tests.waiting import HANG_S, until

_WORDS = ("the", "agent", "reads", "a", "file", "and", "writes", "what", "it", "found")
_POOL = 2048
_fresh = count(1)


@pytest.fixture(scope="module")
def small_node(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two engines with small caches behind a balancer."""
    flags = ("--instances", "2", "--max-total-tokens", str(_POOL), "--pin-budget", "0.5")
    logs = tmp_path_factory.mktemp("pins")
    with start_node(logs, *flags) as started:
        yield started


def text(words: int) -> str:
    """A text that nobody sent before."""
    source = random.Random(next(_fresh))
    return f"{next(_fresh)} " + " ".join(source.choice(_WORDS) for _ in range(words))


def body(system: str, question: str, ttl: str | None = None) -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    return {
        "model": "tiny",
        "max_tokens": 1,
        "system": [{"type": "text", "text": system, **mark}],
        "messages": [{"role": "user", "content": question}],
    }


def asked(node: Node, request: dict[str, Any]) -> dict[str, int]:
    answer = node.post("/v1/messages", request)
    assert answer.ok, answer.text
    usage: dict[str, int] = answer.json()["usage"]
    return usage


def pins(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = requests.get(f"{node.url}/v1/pins", timeout=HANG_S).json()["pins"]
    return found


def explained(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = node.post("/sgl_ext/explain/v1/messages", request).json()
    return found


def flood(node: Node) -> None:
    """Fills every engine's cache several times over with what nobody asks for again."""
    for _ in range(2 * 3 * _POOL // 500):
        asked(node, body(text(20), text(480)))


def test_a_pinned_prefix_outlasts_a_flood_and_new_sessions_go_to_its_holder(
    small_node: Node,
) -> None:
    kept, lost = text(500), text(500)
    written = asked(small_node, body(kept, "Hello", "1h"))["cache_creation_input_tokens"]
    assert written > 500
    assert asked(small_node, body(lost, "Hello"))["cache_creation_input_tokens"] == 0
    until(lambda: len(pins(small_node)) == 1)
    (pin,) = pins(small_node)
    assert (pin["tokens"], pin["ttl_s"]) == (written, 3600.0)
    flood(small_node)
    for number in range(3):
        request = body(kept, f"Something else, {number}")
        found = explained(small_node, request)
        holder = next(row for row in found["workers"] if row["name"] == pin["worker"])
        assert holder["pinned_tokens"] == written
        assert found["worker"] == pin["worker"]
        assert asked(small_node, request)["cache_read_input_tokens"] >= written
    assert asked(small_node, body(lost, "Something else"))["cache_read_input_tokens"] < 100
    metrics = requests.get(f"{small_node.url}/metrics", timeout=HANG_S).text
    assert f'sgl_ext_worker_pinned_tokens{{worker="{pin["worker"]}"}} {written:.1f}' in metrics


def test_the_state_tells_what_engines_have_pinned(small_node: Node) -> None:
    asked(small_node, body(text(40), "Hello", "1h"))

    def told() -> bool:
        state = requests.get(f"{small_node.url}/sgl_ext/state", timeout=HANG_S).json()
        pinned = Counter(pin["worker"] for pin in state["pins"])
        memory = {each["id"]: each["kv"] for each in state["engines"]}
        assert {each["total_tokens"] for each in memory.values()} == {_POOL}
        return bool(pinned) and all(memory[name]["pinned_tokens"] > 0 for name in pinned)

    until(told)


def test_pins_are_given_up_at_the_balancer_by_prefix_and_by_session(small_node: Node) -> None:
    for name in ("one", "two"):
        request = body(text(40), "Hello", "1h") | {"prompt_cache_key": name}
        asked(small_node, request)
    mine = {"one", "two"}
    until(lambda: {pin["session"] for pin in pins(small_node)} >= mine)
    prefix = next(pin["prefix"] for pin in pins(small_node) if pin["session"] == "two")
    worker = next(pin["worker"] for pin in pins(small_node) if pin["session"] == "two")
    for query in ("session=one", f"prefix={prefix}&worker={quote(worker)}"):
        answer = requests.delete(f"{small_node.url}/v1/pins?{query}", timeout=HANG_S)
        assert answer.ok
        assert sum(each["deleted"] for each in answer.json().values()) == 1
    until(lambda: not mine & {pin["session"] for pin in pins(small_node)})
    assert requests.delete(f"{small_node.url}/v1/pins", timeout=HANG_S).status_code == 400
