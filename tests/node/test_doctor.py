"""The doctor on a node of real engines: what it says is lost, the engines computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import orjson
import pytest

from bench._node import Node
from bench._trace_run import router
from sgl_ext.doctor.__main__ import main
from tests.doctor.prompts import CHAT, RULE, turns

pytestmark = pytest.mark.engine


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
def fresh(node: Node) -> Iterator[Node]:
    """The node's engines behind one more balancer, which no other test has sent a prompt to."""
    with router("ours", node.engines, "--diagnose", "--drain-s", "0") as url:
        yield replace(node, url=url)


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
