"""`sgl-ext doctor compare`: two request logs, as a balancer writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from sgl_ext.balancer.reporting.request_log import (
    Course,
    End,
    Finding,
    Name,
    Outcome,
    as_line,
    ended_request,
)
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.doctor.__main__ import main
from sgl_ext.reading.client import ClientFacts
from sgl_ext.reading.segments import Chain
from sgl_ext.reading.usage import Usage

PRICES = 'currency = "USD"\ncomputed = 3.0\nread = 0.3\noutput = 15.0\n'


def line(
    session: int,
    *,
    prompt: int = 1000,
    read: int | None = 0,
    output: int = 10,
    tools: int = 7,
    prefix: int = 70,
    version: str = "2.1.0",
    status: int = 200,
    ttft_s: float = 0.1,
    time_s: float = 1.0,
    stated: str = "",
    agent: str = "",
    request_class: str = "",
) -> bytes:
    """The line of an answered request; `tools` and `prefix` are hashes."""
    chain = Chain((tools, prefix), (10, 20), tools=3, tool_segments=1, head_segments=2)
    usage = None if read is None else Usage(prompt, read, prompt - read + output)
    facts = ClientFacts(
        harness="claude-code",
        version=version,
        request_class=request_class,
        agent_id=agent,
        session=stated,
    )
    routing = RoutingRequest(chain, session, 1, prompt - 50, session_name=f"{session:032x}")
    name, course = Name("id", "0" * 32, "/v1/messages"), Course(0.0, ttft_s, 1.0, 1)
    end = End(time_s, status, Outcome.COMPLETE, None, usage)
    return as_line(ended_request(name, end, course, routing, None, Finding(None, facts)))


def compared(
    folder: Path, capsys: pytest.CaptureFixture[str], before: list[bytes], after: list[bytes]
) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(shown(folder, capsys, before, after, "--json"))
    return document


def shown(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    before: list[bytes],
    after: list[bytes],
    *flags: str,
) -> str:
    paths = folder / "before.log", folder / "after.log"
    for path, lines in zip(paths, (before, after), strict=True):
        path.write_bytes(b"".join(lines))
    prices = folder / "prices.toml"
    prices.write_text(PRICES)
    assert main(["compare", *map(str, paths), "--prices", str(prices), *flags]) == 0
    return capsys.readouterr().out


def test_tokens_and_costs_are_those_of_the_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [line(1), line(1, prompt=2000, read=0), line(2)]
    after = [line(1), line(1, prompt=2000, read=1000)]
    found = compared(tmp_path, capsys, before, after)
    assert found["before"]["tasks"] == 2
    assert found["before"]["computed_per_task"] == 2000
    assert found["before"]["output_per_task"] == 15
    assert (found["before"]["cached_share"], found["after"]["cached_share"]) == (0, 0.3333)
    assert found["after"]["computed_per_task"] == 2000
    assert found["after"]["read_per_task"] == 1000
    assert found["after"]["cost"] == round((2000 * 3 + 1000 * 0.3 + 20 * 15) / 1e6, 4)
    # A task cost 6,225 millionths before, and costs 6,600 now, as its prompts are longer.
    assert found["saved"] == round((6225 - 6600) / 1e6, 4)


def test_how_stable_prompts_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [line(1, prefix=70), line(1, prefix=71), line(1, prefix=72), line(1, prefix=72)]
    after = [line(1, prefix=70)] * 4 + [line(2, prefix=90)]
    found = compared(tmp_path, capsys, before, after)
    assert (found["before"]["same_prefix_share"], found["after"]["same_prefix_share"]) == (
        0.3333,
        1,
    )
    assert found["before"]["same_tools_share"] == 1
    (family,) = found["families"]
    assert (family["before"]["beginnings"], family["after"]["beginnings"]) == (3, 2)
    assert family["tools"] == 3


def test_turns_of_the_id_that_the_client_states_are_one_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A balancer that took another system text for another session wrote the first log.
    before = [line(number, prefix=number, stated="s") for number in (1, 1, 2, 3)]
    of_agents = [
        line(1, prefix=70, stated="s", request_class="main"),
        line(2, prefix=80, stated="s", request_class="subagent"),
        line(1, prefix=70, stated="s", request_class="main"),
        line(3, prefix=90, stated="s", request_class="subagent", agent="a"),
    ]
    found = compared(tmp_path, capsys, before, of_agents)
    assert (found["before"]["tasks"], found["before"]["same_prefix_share"]) == (1, 0.3333)
    # Turns of a lead and of a sub-agent, which alternate, are not compared with one another.
    assert (found["after"]["tasks"], found["after"]["same_prefix_share"]) == (2, 1)


def test_families_have_their_share_and_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [line(1, tools=7, prompt=3000), line(2, tools=8, read=1000)]
    found = compared(tmp_path, capsys, before, [line(3, tools=7)])
    first, second = found["families"]
    assert (first["before"]["share"], second["before"]["share"]) == (0.75, 0.25)
    assert (second["before"]["computed_tokens"], second["after"]["requests"]) == (0, 0)
    assert second["before"]["cost"] == round((1000 * 0.3 + 10 * 15) / 1e6, 4)


@pytest.mark.parametrize(
    ("later", "what"),
    [
        ({"tools": 8}, ["tools"]),
        ({"prefix": 80}, ["instructions"]),
        ({}, []),
    ],
)
def test_a_version_that_changes_how_prompts_begin_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], later: dict[str, int], what: list[str]
) -> None:
    before = [line(session, time_s=1.0) for session in (1, 2)]
    after = [line(session, version="2.2.0", time_s=2.0, **later) for session in (3, 4)]
    found = compared(tmp_path, capsys, before, after)["version_changes"]
    assert [change["what"] for change in found] == what
    if what:
        text = shown(tmp_path, capsys, before, after)
        assert f"claude-code 2.1.0 -> 2.2.0: its {what[0]} changed" in text


def test_instructions_that_differ_between_all_sessions_are_no_change_of_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [line(session, prefix=session) for session in (1, 2)]
    after = [line(session, prefix=session, version="2.2.0", time_s=2.0) for session in (3, 4)]
    assert compared(tmp_path, capsys, before, after)["version_changes"] == []


def test_what_was_not_answered_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(tmp_path, capsys, [line(1), line(1, status=400)], [line(1, read=None)])
    assert (found["before"]["requests"], found["after"]["requests"]) == (1, 1)
    # An answer without usage counts by its estimate, as not cached.
    assert found["after"]["computed_per_task"] == 950


@pytest.mark.parametrize("field", ["prompt_tokens", "counted_tokens", "tools_count"])
@pytest.mark.parametrize("number", [-1, 10**30, "x"])
def test_a_line_with_a_number_that_is_no_count_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, number: Any
) -> None:
    wrong = orjson.loads(line(2)) | {field: str(number)}
    lines = [line(1), orjson.dumps(wrong) + b"\n"]
    assert compared(tmp_path, capsys, lines, lines)["before"]["requests"] == 1


def test_a_log_without_answers_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(tmp_path, capsys, [line(1, status=400)], [line(1)])
    (row,) = [row for row in text.splitlines() if row.startswith("TTFT in ms, p50")]
    assert row.split() == ["TTFT", "in", "ms,", "p50", "-", "100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("computed = 'x'", "computed='x': must be a number, 0 or more"),
        ("computed = -1", "computed=-1: must be"),
        ("input = 1", "input: is no price; there are computed, read, output"),
        ("[models.qwen]\nread = true", "models.qwen.read=True: must be"),
        ("models = 3", "models: must be tables"),
        ("currency = 3", "currency=3: must be a short text"),
        ("=", "prices.toml: "),
    ],
)
def test_wrong_prices_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    log, prices = tmp_path / "a.log", tmp_path / "prices.toml"
    log.write_bytes(line(1))
    prices.write_text(text)
    assert main(["compare", str(log), str(log), "--prices", str(prices)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, b"", b"not json\n", b"[]\n", b'{"prompt_tokens": 3}\n'])
def test_a_file_that_is_no_request_log_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes | None
) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_bytes(line(1))
    if text is not None:
        bad.write_bytes(text)
    assert main(["compare", str(good), str(bad)]) == 2
    assert "bad.log: " in capsys.readouterr().err


def test_prices_of_one_model_replace_the_usual_ones(tmp_path: Path) -> None:
    from sgl_ext.doctor.comparison import read_prices
    from sgl_ext.doctor.request_log import Tokens

    path = tmp_path / "prices.toml"
    path.write_text(PRICES + "[models.small]\ncomputed = 1.0\n")
    prices = read_prices(path)
    million = Tokens(1_000_000, 1_000_000, 0)
    assert prices.of("other", million) == pytest.approx(3.3)
    assert prices.of("small", million) == pytest.approx(1.3)
