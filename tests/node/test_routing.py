"""Routing on a node of two real engines: the balancer follows what they really hold."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from tests.waiting import HANG_S, until

CHAT = "/v1/chat/completions"


def body(harness: str, *texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    system = {"role": "system", "content": f"You are {harness}. " * 600}
    return {"model": "m", "max_tokens": 4, "messages": [system, *turns]}


def asked(node: Node, request: dict[str, Any]) -> tuple[int, int]:
    """A request's prompt tokens, and how many of them were cached."""
    answer = node.post(CHAT, request)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def explained(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = node.post("/sgl_ext/explain" + CHAT, request).json()
    return document


def held(node: Node, request: dict[str, Any]) -> list[int]:
    return [worker["held_tokens"] for worker in explained(node, request)["workers"]]


def test_a_conversation_stays_where_it_is_cached(node: Node) -> None:
    texts = ["Find the bug."]
    total, _ = asked(node, body("the tester of homes", *texts))
    for turn in range(5):
        texts += ["Looking.", f"Go on, {turn}."]
        before = total
        total, cached = asked(node, body("the tester of homes", *texts))
        assert cached >= before - 16, f"turn {turn} went elsewhere"


def test_the_balancer_knows_how_much_each_engine_holds(node: Node) -> None:
    request = body("the tester of knowledge", "Hello")
    total, _ = asked(node, request)
    until(lambda: max(held(node, request)) == total)
    found = explained(node, body("the tester of knowledge", "Hello", "Hi.", "More"))
    (home,) = (worker for worker in found["workers"] if worker["held_tokens"])
    assert (found["worker"], home["held_tokens"]) == (home["name"], total)


def test_an_engine_s_events_begin_with_all_that_it_holds(node: Node) -> None:
    """A balancer that has just started waits for it."""
    request = body("the tester of snapshots", "Hello")
    total, _ = asked(node, request)
    until(lambda: max(held(node, request)) == total)
    found = []
    for engine in node.engines:
        with requests.get(f"{engine}/sgl_ext/events", stream=True, timeout=HANG_S) as stream:
            lines = []
            for line in stream.iter_lines():
                lines.append(json.loads(line))
                if lines[-1].get("complete"):
                    break
        assert lines[0]["snapshot"]
        found += [row for line in lines for row in line.get("stored", [])]
    assert total in [tokens for _, _, tokens in found]
    assert requests.get(f"{node.url}/ready", timeout=HANG_S).status_code == 200


def test_a_flush_is_followed(node: Node) -> None:
    request = body("the tester of flushes", "Hello")
    asked(node, request)
    until(lambda: max(held(node, request)) > 0)
    node.flush()
    until(lambda: max(held(node, request)) == 0)


def test_an_engine_flushed_behind_the_balancer_s_back_is_found_out(node: Node) -> None:
    request = body("the tester of back doors", "Hello")
    asked(node, request)
    until(lambda: max(held(node, request)) > 0)
    for engine in node.engines:
        requests.post(f"{engine}/flush_cache", timeout=HANG_S).raise_for_status()
    until(lambda: max(held(node, request)) == 0)


def test_sub_agents_that_start_together_compute_their_prefix_once(node: Node) -> None:
    node.flush()
    with ThreadPoolExecutor(6) as pool:
        results = list(
            pool.map(lambda n: asked(node, body("an explorer", f"Explore part {n}")), range(6))
        )
    computed = sum(total - cached for total, cached in results)
    prompt = max(total for total, _ in results)
    assert computed < 1.2 * prompt


def test_an_explanation_leaves_no_trace(node: Node) -> None:
    request = body("the tester of explanations", "Hello")
    for _ in range(3):
        assert max(held(node, request)) == 0


def test_a_request_that_makes_engines_fail_shuts_none_of_them_out(node: Node) -> None:
    def states() -> set[str]:
        answer = requests.get(f"{node.url}/sgl_ext/workers", timeout=HANG_S)
        return {worker["breaker"] for worker in answer.json()["workers"]}

    seen: set[str] = set()

    def are_well_again() -> bool:
        seen.update(now := states())
        return now == {"closed"}

    # It may write no token: the grammar ends with the first one, and two more are asked for.
    sampling = {"regex": "a", "min_new_tokens": 3, "max_new_tokens": 4}
    while "suspected" not in states():
        answer = node.post("/generate", {"text": "go on", "sampling_params": sampling})
        assert answer.status_code == 500
    until(are_well_again)
    assert "open" not in seen
