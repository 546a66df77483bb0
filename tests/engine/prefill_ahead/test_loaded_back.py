"""A real engine with host memory loads a session's prefix back while the session's tool runs.

Other requests take the session's device memory while a long request keeps the engine busy. So
nothing is loaded before that request ends, however long the tests take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.protocols.routes import PREFILL
from sgl_ext.settings.schema import EngineSettings
from tests.engine.prefill_ahead.test_prefill import ASKED, CHAT, Serving, until
from tests.engine.scheduler.test_event_publisher import running_engine, user
from tests.waiting import HANG_S

TASKS = ("Mend the greeting.", "Mend the farewell.", "Mend the thanks.")
CALL = {"name": "Bash", "arguments": {"command": "ls"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "Bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
FLAGS = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
FLAGS += ("--hicache-write-policy", "write_through", "--chunked-prefill-size", "512")
FLAGS += ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
LENGTH = 900
SLACK = 64  # the tool's result, and what is around it


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("returns")
    script = folder / "script.jsonl"
    lines = [{"after": task, "text": "I look.", "tool_calls": [CALL]} for task in TASKS]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = EngineSettings(prefill_ahead_slice_tokens=256)
    checks = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLEXT_CPU_SCRIPT": str(script)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings.to_environment(), **checks}.items():
            patch.setenv(name, value)
        log = folder / "engine.log"
        with running_engine(nursery, tiny_model, log, *FLAGS) as started:
            serving = Serving(started, log)
            yield serving
            serving.assert_sound()


class Agent:
    """A session whose first turn ends with a call of a tool."""

    def __init__(self, engine: Serving, task: str) -> None:
        self._engine = engine
        self._headers = {"x-sgl-ext-session-id": task}
        self._messages: list[Any] = [user(LENGTH)]
        self._messages[0]["content"] += f" {task}"

    def begin(self) -> None:
        """The first turn, until its session is expected back."""
        expected = self._engine.counted("returns_expected")
        (choice,) = self._ask(200)["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        said = {key: value for key, value in choice["message"].items() if value is not None}
        (call,) = said["tool_calls"]
        self._messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "a.py"}]
        until(lambda: self._engine.counted("returns_expected") == expected + 1)

    def come_back(self) -> tuple[int, dict[str, int], str]:
        """The next turn: its tokens, how many of them each tier had, and its answer."""
        answer = self._ask(12)
        message = answer["choices"][0]["message"]
        said = f"{message['reasoning_content']} {message['content']}"
        details = answer.get("sglext", {"cached_tokens_details": None})["cached_tokens_details"]
        tiers = details or {"device": 0, "host": 0}
        return answer["usage"]["prompt_tokens"], tiers, said

    def _ask(self, tokens: int) -> Any:
        body = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "tools": [TOOL], **ASKED}
        body |= {"messages": self._messages, "return_cached_tokens_details": True}
        answer = self._engine.post(CHAT, body, headers=self._headers)
        assert answer.ok, answer.text
        return answer.json()


def spill(engine: Serving) -> None:
    """Other prompts take the device's memory."""
    for _ in range(6):
        engine.post(CHAT, {"model": "tiny", "max_tokens": 1, "messages": [user(700)]})


def test_a_spilled_prefix_is_loaded_before_its_session_returns(engine: Serving) -> None:
    agent = Agent(engine, TASKS[0])
    agent.begin()
    until(engine.is_level)
    names = ("loaded_ahead_tokens", "loaded_ahead_tokens_used")
    before = [engine.counted(name) for name in names]
    with engine.busy():
        spill(engine)
        assert engine.counted("loaded_ahead_tokens") == before[0]
    until(lambda: engine.counted("loaded_ahead_tokens") > before[0] + LENGTH - SLACK)
    until(engine.is_level)
    tokens, tiers, said = agent.come_back()
    assert tiers["host"] == 0
    assert tiers["device"] >= tokens - SLACK
    loaded, used = (engine.counted(name) - old for name, old in zip(names, before, strict=True))
    assert used == loaded
    assert engine.counted("returns", result="ready") == 1
    engine.flush()
    _, tiers, cold = agent.come_back()
    assert tiers["device"] + tiers["host"] < SLACK
    assert said == cold


@pytest.mark.slow
def test_a_session_that_returns_first_loads_its_prefix_itself(engine: Serving) -> None:
    agent = Agent(engine, TASKS[1])
    agent.begin()
    until(engine.is_level)
    names = ("prefills_ahead", "loaded_ahead_tokens", "loaded_ahead_tokens_used")
    loads, *before = [
        engine.counted(names[0], kind="return"),
        *(engine.counted(name) for name in names[1:]),
    ]
    with engine.busy(goes_on=True):
        spill(engine)
        until(lambda: engine.counted("prefills_ahead", kind="return") == loads + 1)
        tokens, tiers, _ = agent.come_back()
    assert tiers["host"] > LENGTH - SLACK
    assert tiers["device"] + tiers["host"] >= tokens - SLACK
    assert engine.counted("returns", result="late") == 1
    until(engine.is_level)
    assert [engine.counted(name) for name in names[1:]] == before


def test_a_client_withdraws_what_is_expected(engine: Serving) -> None:
    agent, url = Agent(engine, TASKS[2]), f"{engine.url}{PREFILL}"
    agent.begin()
    answers = [requests.delete(url, params={"session": TASKS[2]}, timeout=HANG_S) for _ in range(2)]
    first, second = (answer.json()["deleted"] for answer in answers)
    assert first in (1, 2), "the return, and the next turn if its prefill waits already"
    assert second == 0
    until(engine.is_level)
    loads = engine.counted("prefills_ahead", kind="return")
    spill(engine)
    _, tiers, _ = agent.come_back()
    assert tiers["host"] > LENGTH - SLACK
    assert engine.counted("prefills_ahead", kind="return") == loads
    assert engine.counted("returns", result="deleted") == 1
