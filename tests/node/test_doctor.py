"""The doctor on a node of real engines: what it says is lost, the engines computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import requests
from anthropic.types import Message
from sgl_ext_cpu.node import Node, running_balancer

from sgl_ext.doctor.__main__ import main
from tests.prompts.examples import CHAT, MESSAGES, RULE, turns
from tests.waiting import HANG_S, until


def asked(node: Node, agent: str, count: int, begin: str) -> tuple[int, int]:
    """A turn's prompt tokens, and how many of them an engine did not have."""
    messages = [{"role": "system", "content": f"{begin}\n{RULE * 60}"}]
    for message in turns(count):
        blocks = message["content"]
        text = blocks if isinstance(blocks, str) else str(blocks[0])
        messages.append({"role": message["role"], "content": text})
    body = {"model": "m", "max_tokens": 2, "messages": messages}
    answer = node.post(CHAT, body, headers={"user-agent": agent, "session-id": agent})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens"] - cached


@pytest.fixture
def fresh(node: Node, tmp_path: Path) -> Iterator[Node]:
    """The node's engines with a balancer of their own, to which no other test has sent a prompt."""
    flags = ("--diagnose", "--drain-s", "0")
    with running_balancer(node.engines, tmp_path / "log", *flags) as balancer:
        yield replace(node, url=balancer.url)


def test_it_finds_a_clock_and_what_it_costs(
    fresh: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    computed = [asked(fresh, "codex_test/1", n, f"It is 12:00:0{n}.") for n in range(3)]
    for count in range(3):
        asked(fresh, "opencode/test", count, "You work for the doctor's test.")
    assert main(["--url", fresh.url, "--json"]) == 1
    told = {row["harness"]: row for row in orjson.loads(capsys.readouterr().out)["harnesses"]}
    assert told["opencode"]["findings"] == []
    (found,) = told["codex"]["findings"]
    assert (found["kind"], found["where"], found["times"]) == ("clock", "messages[0].content", 2)
    again = sum(tokens for _, tokens in computed[1:])
    assert found["tokens"] == pytest.approx(again, rel=0.35)


def test_an_answer_tells_a_change_from_an_eviction(fresh: Node) -> None:
    """The same conversation with another system prompt, and after its cache was flushed."""
    said = [{"role": "user", "content": RULE * 30}]
    asked: dict[str, object] = {
        "model": "m",
        "max_tokens": 2,
        "system": f"It is 12:00.\n{RULE * 60}",
    }

    def told(earlier: str | None, **changed: object) -> Message:
        body = asked | {"messages": said, "diagnostics": {"previous_message_id": earlier}}
        answer = fresh.post(MESSAGES, body | changed, headers={"session-id": "diagnosed"})
        assert answer.status_code == 200, answer.text
        return Message.model_validate(answer.json())

    first = told(None)
    assert first.diagnostics is None
    said += [{"role": "assistant", "content": RULE}, {"role": "user", "content": RULE * 9}]
    second = told(first.id)
    assert second.diagnostics is None
    changed = told(second.id, system=f"It is 12:01.\n{RULE * 60}").diagnostics
    assert changed is not None
    assert changed.cache_miss_reason is not None
    found = changed.cache_miss_reason.model_dump()
    assert (found["type"], found["block"], found["cause"]) == ("system_changed", "system", "clock")
    fresh.flush()
    # Until the balancer has heard of it, it takes the prompt for rendered otherwise.
    metrics = f"{fresh.url}/metrics"
    until(lambda: "\nsgl_ext_index_segments 0" in requests.get(metrics, timeout=HANG_S).text)
    lost = told(second.id).diagnostics
    assert lost is not None
    assert lost.cache_miss_reason is not None
    found = lost.cache_miss_reason.model_dump()
    assert (found["type"], found["cause"]) == ("unavailable", "evicted")
    assert found["cache_missed_input_tokens"] > 500
