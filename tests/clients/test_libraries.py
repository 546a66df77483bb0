"""Libraries as their users call them: two sessions of a tool loop of three requests each, the
first one whole and the second one streamed, with different prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.node import ROOT, Node

from tests.clients import table
from tests.clients.agents import assert_read_from_cache
from tests.clients.install import installed
from tests.clients.recorder import Exchange, Recorder, recording
from tests.clients.scripts import (
    CLIENT_ANSWER,
    CLIENT_CALLS,
    CLIENT_PROMPTS,
    CLIENT_SYSTEM,
    CLIENT_THOUGHT,
)
from tests.waiting import HANG_S

pytestmark = pytest.mark.installs
_DRIVERS = Path(__file__).with_name("drivers")
_RESULT = "Nothing of note. " * 20
_PROTOCOLS = {
    "/v1/messages": "messages",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
}
_URL = "the base URL"


@dataclass(frozen=True)
class Library:
    """A driver's variant.

    protocol: what it says. settings: what had to be set, for the table. The script follows the
    prompts with calls and an answer, in this number of requests.
    """

    client: str
    driver: str
    variant: str
    protocol: str
    settings: str = _URL
    prompts: Sequence[str] = CLIENT_PROMPTS
    calls: Sequence[Any] = tuple(CLIENT_CALLS)
    answer: str = CLIENT_ANSWER
    requests: int = 3

    def __str__(self) -> str:
        return f"{self.client} {self.variant}".replace(" ", "-").lower()


IN_THE_SUITE = [
    Library("AI SDK", "ai_sdk.mjs", "responses", "responses"),
    Library("AI SDK", "ai_sdk.mjs", "anthropic", "messages"),
    Library("openai SDK", "sdks.py", "chat", "chat"),
    Library("anthropic SDK", "sdks.py", "messages", "messages"),
]
OTHERS = [
    Library("openai SDK", "sdks.py", "responses", "responses"),
    Library("AI SDK", "ai_sdk.mjs", "compatible", "chat (openai-compatible)"),
    Library("AI SDK", "ai_sdk.mjs", "chat", "chat", "the base URL, `openai.chat(...)`"),
    Library("anthropic SDK", "sdks.py", "tool_runner", "messages (`tool_runner`)"),
    Library("openai-agents", "openai_agents.py", "responses", "responses"),
    Library("openai-agents", "openai_agents.py", "chat", "chat"),
    Library("pydantic-ai", "pydantic_ai_agent.py", "chat", "chat"),
    Library("pydantic-ai", "pydantic_ai_agent.py", "responses", "responses"),
    Library("pydantic-ai", "pydantic_ai_agent.py", "messages", "messages"),
    Library("LangChain openai", "langchain_model.py", "chat", "chat"),
    Library("LangChain openai", "langchain_model.py", "responses", "responses"),
    Library("LangChain anthropic", "langchain_model.py", "messages", "messages"),
    Library("LiteLLM", "litellm_model.py", "openai", "chat (`openai/`)"),
    Library("LiteLLM", "litellm_model.py", "custom_openai", "chat (`custom_openai/`)"),
    Library("LiteLLM", "litellm_model.py", "hosted_vllm", "chat (`hosted_vllm/`)"),
    Library("LiteLLM", "litellm_model.py", "anthropic", "messages (`anthropic/`)"),
    Library("llm", "llm_model.py", "chat", "chat", "`extra-openai-models.yaml`"),
    *(
        Library(
            *("instructor", "instructor_model.py", variant, f"chat (`Mode.{variant.upper()}`)"),
            prompts=(f"First, tell the port by a {way}.", f"And now, tell the port by a {way}."),
            calls=(),
            answer="30000",
            requests=1,
        )
        for variant, way in (("tools", "tool"), ("json_schema", "schema"))
    ),
]


@pytest.fixture(scope="module")
def recorder(scripted: Node) -> Iterator[Recorder]:
    with recording(scripted.url) as started:
        yield started


def run(
    library: Library, recorder: Recorder, model: str, key: str, folder: Path
) -> list[dict[str, Any]]:
    """What the driver told of its sessions."""
    commands = installed(library.client)
    is_node = library.driver.endswith(".mjs")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LLM_USER_PATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NODE_URL": recorder.url,
        "NODE_KEY": key,
        "NODE_MODEL": model,
        "NODE_PROMPTS": json.dumps(library.prompts),
        "NODE_SYSTEM": f"You serve {library}. {CLIENT_SYSTEM}",
        "NODE_RESULT": _RESULT,
        "NODE_PACKAGES": str(commands.parent),
    }
    done = subprocess.run(
        ["node" if is_node else commands / "python", _DRIVERS / library.driver, library.variant],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + recorder.problems()
    told: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return told


def sessions(library: Library, exchanges: Sequence[Exchange]) -> Sequence[Sequence[Exchange]]:
    """Those of the first and of the second prompt."""
    second = library.prompts[1].encode()
    begin = next(n for n, each in enumerate(exchanges) if second in each.body)
    return exchanges[:begin], exchanges[begin:]


def read_by_current_sdks(exchanges: Sequence[Exchange]) -> str:
    """What the current SDKs do not know of these answers."""
    told = [[each.path, each.status, each.kind, each.answer.decode()] for each in exchanges]
    done = subprocess.run(
        [installed("openai SDK") / "python", "-m", "tests.sdk_models"],
        input="".join(json.dumps(each) + "\n" for each in told),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    return done.stdout


def check(library: Library, recorder: Recorder, model: str, key: str, folder: Path) -> None:
    recorder.exchanges.clear()
    told = run(library, recorder, model, key, folder)
    assert [each["answer"] for each in told] == [library.answer] * 2
    for each in told:
        # Two calls at once are made at once.
        assert sorted(each["calls"]) == sorted(library.calls)
        if library.client == "AI SDK" and library.variant in ("compatible", "anthropic"):
            assert [text.strip() for text in each["reasoning"][:2]] == [CLIENT_THOUGHT] * 2
    assert recorder.problems() == ""
    if library.client in ("openai SDK", "anthropic SDK"):
        assert read_by_current_sdks(recorder.exchanges) == ""
    both = sessions(library, recorder.generated())
    for session in both:
        assert {_PROTOCOLS[each.path] for each in session} == {library.protocol.split()[0]}
        assert_read_from_cache(
            [turn for each in session if (turn := each.turn())], requests=library.requests
        )
    first = both[1][0].turn()
    assert first
    assert first.cached_tokens >= 0.9 * first.prompt_tokens
    measured = {"requests": len(both[1]), "set": library.settings}
    table.note(library.client, library.protocol, first, **measured)


@pytest.mark.parametrize(
    "library",
    [*IN_THE_SUITE, *(pytest.param(each, marks=pytest.mark.other_clients) for each in OTHERS)],
    ids=str,
)
def test_a_tool_loop(
    library: Library,
    recorder: Recorder,
    scripted_model: str,
    api_keys: dict[str, str],
    tmp_path: Path,
) -> None:
    check(library, recorder, scripted_model, api_keys["sdks"], tmp_path)
