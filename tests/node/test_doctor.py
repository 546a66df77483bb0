"""The doctor on a node of real engines: what it says is lost, the engines computed again."""

from __future__ import annotations

import orjson
import pytest

from bench._node import Node
from sgl_ext.doctor.__main__ import main
from tests.doctor.prompts import CHAT, RULE, turns

pytestmark = pytest.mark.engine
MODEL = "the doctor's test"  # other tests have told this node of other prompts


def asked(node: Node, agent: str, count: int, begin: str) -> tuple[int, int]:
    """A turn's prompt tokens, and how many of them an engine did not have."""
    messages = [{"role": "system", "content": f"{begin}\n{RULE * 60}"}]
    for message in turns(count):
        blocks = message["content"]
        text = blocks if isinstance(blocks, str) else str(blocks[0])
        messages.append({"role": message["role"], "content": text})
    body = {"model": MODEL, "max_tokens": 2, "messages": messages}
    answer = node.post(CHAT, body, headers={"user-agent": agent, "session-id": agent})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens"] - cached


def test_it_finds_a_clock_and_what_it_costs(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    computed = [asked(node, "codex_test/1", n, f"It is 12:00:0{n}.") for n in range(3)]
    for count in range(3):
        asked(node, "opencode/test", count, "You work for the doctor's test.")
    assert main(["--url", node.url, "--json"]) == 1
    rows = orjson.loads(capsys.readouterr().out)["harnesses"]
    told = {row["harness"]: row for row in rows if row["model"] == MODEL}
    assert told["opencode"]["findings"] == []
    (found,) = told["codex"]["findings"]
    assert (found["kind"], found["where"], found["times"]) == ("clock", "messages[0].content", 2)
    again = sum(tokens for _, tokens in computed[1:])
    # An estimate, by what other tests' prompts have taught the balancer of bytes and tokens.
    assert again / 3 <= found["tokens"] <= 3 * again
