"""The command line: sources, errors and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from sgl_ext.doctor.__main__ import main
from sgl_ext.prompts.findings import Findings, merged

FOUND = {"scope": "session", "part": "messages", "block": "messages[7].content[0]", "byte": 3}
FOUND |= {"bytes": 9, "kind": "rewritten", "tokens": 60}


def line(divergence: Any = None, **fields: Any) -> bytes:
    record = {"harness": "codex", "model": "m", "prompt_tokens": 100, "divergence": divergence}
    return orjson.dumps(record | fields, option=orjson.OPT_APPEND_NEWLINE)


def log_of(folder: Path, *written: bytes) -> str:
    path = folder / "requests.log"
    path.write_bytes(b"".join(written))
    return str(path)


def test_findings_are_ranked_by_tokens_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = FOUND | {"block": "messages[9].content[0]"}
    order = FOUND | {"part": "tools", "block": "tools[0]", "kind": "tool_order", "tokens": 70}
    log = log_of(tmp_path, line(order), line(FOUND), line(other), line(harness="sdk"))
    assert main([log]) == 1
    shown = capsys.readouterr().out
    assert shown.index("messages[*].content[0]") < shown.index("tools[*]")
    assert "~120  40.0%      2  messages[*].content[0]  turns" in shown
    assert "sdk, model m: 1 prompt, 100 tokens\n  No prompt diverges" in shown


def test_without_prompts_there_are_no_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([log_of(tmp_path)]) == 0
    assert "no prompts yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", [b"not json\n", b'{"route": "/v1/messages"}\n', b"[1]\n", b"\xff\n"]
)
def test_a_file_that_is_no_request_log_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    assert main([log_of(tmp_path, text)]) == 2
    assert "not a request log" in capsys.readouterr().err
    assert main([log_of(tmp_path, text, line())]) == 0
    assert "1 lines could not be read" in capsys.readouterr().err


def test_a_line_with_a_malformed_divergence_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([log_of(tmp_path, line({"kind": "clock"}), line(3), line())]) == 0
    assert "1 prompt," in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["a", "--url", "http://b"], ["--what"]])
def test_wrong_arguments_are_an_error(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["/nowhere/requests.log"],
        ["--url", "http://127.0.0.1:1"],
        ["--url", "not a url"],
        ["--url", "http://127.0.0.1:1", "--api-key", "sk-secret"],
    ],
)
def test_an_unreadable_source_is_an_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("sgl-ext doctor: ")
    assert "sk-secret" not in told


def test_findings_of_processes_are_merged_within_bounds() -> None:
    findings = Findings()
    for number in range(5000):
        found = FOUND | {"part": "system", "block": f"b{number}"}
        findings.add("sdk", f"m{number % 300}", 10, found)
    document = merged([findings.as_json(), findings.as_json()])
    rows = [row for told in document["harnesses"] for row in told["findings"]]
    assert len(document["harnesses"]) <= 257
    assert len(rows) <= 2048 + 257
    assert sum(row["times"] for row in rows) == 10000
    assert sum(told["prompts"] for told in document["harnesses"]) == 10000
