"""Clients whose conversation outgrows the window of a node with little KV memory: they compact.

Each reads files until the engine refuses its prompt, or until it knows that the engine would. Then
it asks for a summary, begins again with it, and ends its task.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import requests
from sgl_ext_cpu.node import Node, StartNode

from sgl_ext.cli.clients import Client, Connection, clients_of
from tests.clients import scripts
from tests.clients.install import installed
from tests.clients.recorder import Exchange, Recorder, recording
from tests.waiting import HANG_S

pytestmark = [pytest.mark.installs, pytest.mark.other_clients]

_WINDOW_TOKENS = 40_000
_FILES, _LINES = 4, 700
"""A file is about half of the window."""
_REFUSED = (b"context_length_exceeded", b"prompt is too long: ")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("reports")
    found = [folder / f"report{number}.txt" for number in range(_FILES)]
    for file in found:
        lines = (
            f"Line {n} of {file.stem}: the value is {n * 7919 % 10007}." for n in range(_LINES)
        )
        file.write_text("\n".join(lines))
    return found


@pytest.fixture(scope="module")
def small(
    start_node: StartNode, reports: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """An engine whose memory holds less than the model's context."""
    folder = tmp_path_factory.mktemp("small")
    lines = scripts.for_compaction(reports)
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--max-total-tokens", str(_WINDOW_TOKENS))
    environment = {"SGLEXT_CPU_SCRIPT": str(script)}
    with start_node(folder / "logs", *flags, environment=environment) as started:
        yield started


def settings(client: str, url: str, window: int | None) -> Client:
    """What `sgl-ext clients` sets for it."""
    return clients_of(Connection(url, "tiny", None, window))[client]


_WEBSOCKETS = "supports_websockets = true"


def written(client: Client, home: Path, *, websockets: bool = False) -> Mapping[str, str]:
    """Writes its file, and returns its variables. The recorder passes no WebSocket on."""
    assert client.file is not None
    path = home / client.file.path
    path.parent.mkdir(parents=True)
    assert websockets <= (_WEBSOCKETS in client.file.text)
    path.write_text(client.file.text if websockets else client.file.text.replace(_WEBSOCKETS, ""))
    variables = client.file.start.environment
    return {name: value.replace("~", str(home)) for name, value in variables.items()}


def claude_code(url: str, home: Path, window: int | None, prompt: str) -> str:
    start = settings("claude-code", url, window).start
    assert start is not None
    command = [str(installed("Claude Code") / "claude"), *start.command[1:], "-p", prompt]
    command += ["--allowedTools", "Read"]
    if window is None:
        start = start._replace(
            environment={**start.environment, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000"}
        )
    return run(command, home, {**start.environment, "DISABLE_TELEMETRY": "1"})


def codex(
    url: str, home: Path, window: int | None, prompt: str, *, websockets: bool = False
) -> str:
    client = settings("codex", url, window)
    written(client, home, websockets=websockets)
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    start = client.start
    assert start is not None
    words = [*start.command[1:], "exec", *flags, prompt]
    return run([str(installed("Codex") / "codex"), *words], home, start.environment)


def open_code(url: str, home: Path, window: int | None, prompt: str) -> str:
    variables = written(settings("opencode", url, window), home)
    command = [str(installed("OpenCode") / "opencode"), "run", prompt]
    # It goes on, and all the same ends as one that saw an error.
    more = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_PERMISSION": '{"*": "allow"}'}
    return run(command, home, {**variables, **more}, ends_with=(0, 1))


def qwen_code(url: str, home: Path, window: int | None, prompt: str) -> str:
    start = settings("qwen-code", url, window).start
    assert start is not None
    command = [str(installed("Qwen Code") / "qwen"), *start.command[1:], "--yolo", "-p", prompt]
    return run(command, home, {**start.environment, "NO_BROWSER": "1"})


def run(
    command: list[str],
    home: Path,
    environment: Mapping[str, str],
    ends_with: tuple[int, ...] = (0,),
) -> str:
    folder = home / "project"
    folder.mkdir()
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode in ends_with, done.stdout + done.stderr
    return done.stdout


def refused(recorder: Recorder) -> int:
    """How many of its requests were refused as too long."""
    return sum(any(words in each.answer for words in _REFUSED) for each in recorder.exchanges)


def sums_up(exchange: Exchange) -> bool:
    return b"Your task is to create a detailed summary" in exchange.body


@pytest.mark.parametrize(
    ("client", "agent", "knows_window"),
    [
        ("Claude Code", claude_code, False),
        ("Claude Code", claude_code, True),
        # Codex compacts by the window alone: a refused prompt ends its turn.
        ("Codex", codex, True),
        ("OpenCode", open_code, False),
        ("OpenCode", open_code, True),
        ("Qwen Code", qwen_code, False),
        ("Qwen Code", qwen_code, True),
    ],
)
def test_a_client_that_exceeds_the_window_compacts_and_goes_on(
    small: Node,
    tmp_path: Path,
    client: str,
    agent: Callable[[str, Path, int | None, str], str],
    knows_window: bool,
) -> None:
    window = window_of(small) if knows_window else None
    with recording(small.url) as recorder:
        said = agent(recorder.url, tmp_path, window, f"{scripts.READ_ON} {client}.")
    assert scripts.has_read(client) in said
    assert any(scripts.SUMMARY.encode() in each.body for each in recorder.generated())
    assert max(turn.prompt_tokens for turn in recorder.turns()) < _WINDOW_TOKENS
    if agent is claude_code:
        summary = next(each.turn() for each in recorder.generated() if sums_up(each))
        assert summary is not None
        assert summary.cached_tokens > 0.9 * summary.prompt_tokens
    if not knows_window:
        assert refused(recorder) > 0


def test_codex_compacts_on_its_websocket(small: Node, tmp_path: Path) -> None:
    opened = websockets_opened(small)
    prompt = f"{scripts.READ_ON} Codex."
    said = codex(small.url, tmp_path, window_of(small), prompt, websockets=True)
    assert scripts.has_read("Codex") in said
    assert websockets_opened(small) > opened


def websockets_opened(node: Node) -> float:
    page = requests.get(f"{node.url}/metrics", timeout=HANG_S).text
    label = 'sgl_ext_requests_total{path="/v1/responses",status="101"} '
    return sum(float(x.removeprefix(label)) for x in page.splitlines() if x.startswith(label))


def window_of(node: Node) -> int:
    card = requests.get(f"{node.url}/v1/models", timeout=HANG_S).json()["data"][0]
    return int(card["context_length"])
