"""Prompts that part, through a balancer: its log and the doctor say where, and quote nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting import diagnosis
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.doctor.__main__ import main
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import NO_FACTS, shown_name
from sgl_ext.reading.strip import HeaderStrip, strip_request
from tests.balancer.conftest import Engine, Start
from tests.balancer.workers import routed
from tests.prompts.examples import MESSAGES, SYSTEM, TOOLS, messages, system, turns
from tests.waiting import HANG_S

CLAUDE = {"user-agent": "claude-cli/2.1.197 (external, cli)", "x-tenant-id": "team-a"}
SECRET = "hunter2-in-the-prompt"


async def answer(_: web.Request) -> web.StreamResponse:
    usage = {"input_tokens": 100, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 11}
    return web.json_response({"content": [], "usage": usage})


async def ask(client: ClientSession, body: Any, session: str, **more: str) -> None:
    headers = {**CLAUDE, "x-claude-code-session-id": session, **more}
    async with client.post(MESSAGES, json=body, headers=headers) as answered:
        assert answered.status == 200, await answered.text()
        await answered.read()


async def lines(log: Path, count: int) -> list[dict[str, Any]]:
    """The log's lines, once there are so many."""
    async with asyncio.timeout(HANG_S):
        while len(found := log.read_bytes().splitlines()) < count:  # noqa: ASYNC110,ASYNC240
            await asyncio.sleep(0.02)
    return [orjson.loads(line) for line in found]


def clock(count: int, second: int) -> dict[str, Any]:
    time = f"The time is 2026-01-01 12:00:{second:02}, {SECRET}.\n"
    return messages(count, system=system("You are an agent.", time + SYSTEM))


def shuffled(count: int, turn: int) -> dict[str, Any]:
    return messages(count, tools=TOOLS[turn:] + TOOLS[:turn])


def named(count: int, turn: int) -> dict[str, Any]:
    agent = system(f"Run {turn}a8f03c1e52d7b649 of the agent.\n{SYSTEM}")
    return messages(count, system=agent)


def billed(count: int, turn: int) -> dict[str, Any]:
    return messages(count, system=system(f"x-acme-billing: run={turn};", SYSTEM))


@pytest.mark.parametrize(
    ("body", "kind", "where", "advised"),
    [
        (clock, "clock", "system[1]", "move the date or time out of the instructions"),
        (shuffled, "tool_order", "tools[*]", "--sort-tools"),
        (named, "id", "system[0]", "move the id out of the instructions"),
        (billed, "header", "system[0]", "--strip-header NAME"),
    ],
)
async def test_the_doctor_names_a_planted_divergence(
    start: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: Callable[[int, int], dict[str, Any]],
    kind: str,
    where: str,
    advised: str,
) -> None:
    log = tmp_path / "requests.log"
    client = await start(Engine("a", answer), request_log=str(log), diagnose=True)
    for turn in range(4):
        await ask(client, body(turn, turn), "s1")
    told = await lines(log, 4)
    assert [line["divergence"] is None for line in told] == [True, False, False, False]
    found = told[3]["divergence"]
    assert (found["kind"], found["scope"]) == (kind, "session")
    assert 0 < found["tokens"] < told[3]["prompt_tokens"]
    assert (told[3]["harness"], told[3]["tenant"]) == ("claude-code", "team-a")

    assert await asyncio.to_thread(main, [str(log), "--json"]) == 1
    (harness,) = orjson.loads(capsys.readouterr().out)["harnesses"]
    (row,) = harness["findings"]
    assert (harness["harness"], harness["model"], harness["prompts"]) == ("claude-code", "m", 4)
    assert (row["kind"], row["where"], row["times"]) == (kind, where, 3)
    assert row["tokens"] == sum(line["divergence"]["tokens"] for line in told[1:])
    assert harness["lost_tokens"] == row["tokens"] > harness["prompt_tokens"] / 4

    assert await asyncio.to_thread(main, ["--url", str(client._base_url)]) == 1
    shown = capsys.readouterr().out
    assert "claude-code" in shown
    assert where in shown
    assert advised in " ".join(shown.split())
    page = await (await client.get("/metrics")).text()
    assert f'sgl_ext_diverged_prompts_total{{harness="claude-code",kind="{kind}"}} 3.0' in page


async def test_the_client_version_that_broke_the_cache_is_named(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.log"
    client = await start(Engine("a", answer), request_log=str(log), diagnose=True)
    for count, version in enumerate(("2.1.197", "2.1.330", "2.1.330")):
        agent = {"user-agent": f"claude-cli/{version} (external, cli)"}
        tools = TOOLS if version == "2.1.197" else [*TOOLS, {"name": "ToolSearch"}]
        await ask(client, messages(count, tools=tools), "s1", **agent)
    told = await lines(log, 3)
    found = told[1]["divergence"]
    assert (found["version"], found["earlier_version"]) == ("2.1.330", "2.1.197")
    assert found["estimated"] is True
    assert told[2]["divergence"] is None
    assert await asyncio.to_thread(main, [str(log)]) == 1
    shown = capsys.readouterr().out
    assert "(version 2.1.197 -> 2.1.330)" in shown
    assert f"~{found['tokens']:,}" in shown
    assert "estimated from bytes" in shown


async def test_a_compaction_is_known_by_the_clients_header(start: Start) -> None:
    client = await start(Engine("a", answer), diagnose=True)
    await ask(client, messages(12), "s1")
    short = messages(messages=[{"role": "user", "content": "What matters: nothing. Go on."}])
    await ask(client, short, "s1", **{"x-claude-code-context-compacted": "auto"})
    document = await (await client.get("/sgl_ext/divergences")).json()
    assert document["harnesses"][0]["findings"][0]["kind"] == "compaction"


async def test_a_session_that_moves_to_another_context_is_told_the_block(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.log"
    client = await start(Engine("a", answer), request_log=str(log), diagnose=True)
    body = {key: value for key, value in messages(6).items() if key not in ("system", "tools")}

    async def built(rules: str, notes: str = "Notes. ") -> dict[str, Any]:
        blocks = [
            {"id": "tools", "kind": "tools", "layer": "stable", "content": TOOLS},
            {"id": "AGENTS.md", "layer": "stable", "content": rules + SYSTEM},
            {"id": "notes", "layer": "project", "content": notes * 50},
        ]
        headers = {"x-tenant-id": "team-a"}
        answered = await client.post("/v1/contexts", json={"blocks": blocks}, headers=headers)
        return {**body, "context_id": (await answered.json())["context_id"]}

    first, second = await built("Be brief. "), await built("Be kind. ")
    for request, session in ((first, "s1"), (first, "s1"), (second, "s1"), (second, "s1")):
        await ask(client, request, session)
    await ask(client, await built("Be kind. ", "Other. "), "s1")
    found = [line["divergence"] for line in await lines(log, 5)]
    assert [each and each["block"] for each in found] == [
        None,
        None,
        "block AGENTS.md of layer stable",
        None,
        "block notes of layer project",
    ]
    assert found[2]["kind"] == "context_changed"
    assert found[2]["tokens"] > 0
    assert main([str(log)]) == 1
    report = capsys.readouterr().out
    assert "block AGENTS.md of layer stable" in report
    assert "sgl-ext context build" in " ".join(report.split())


async def test_sessions_that_do_not_begin_alike_are_named(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.log"
    client = await start(Engine("a", answer), request_log=str(log), diagnose=True)
    for number in range(3):
        first = turns(0, f"Task {number}")
        await ask(client, clock(0, number) | {"messages": first}, f"s{number}")
    scopes = [line["divergence"] and line["divergence"]["scope"] for line in await lines(log, 3)]
    assert scopes == [None, "fleet", "fleet"]
    assert await asyncio.to_thread(main, [str(log)]) == 1
    assert "sessions" in capsys.readouterr().out


async def test_a_trace_without_divergence_has_no_findings(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.log"
    client = await start(Engine("a", answer), request_log=str(log), diagnose=True)
    for turn in range(4):
        for session in ("s1", "s2"):
            # The line that the strip knows is no divergence.
            billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}{session};"
            own = messages(messages=turns(turn, f"Task {session}", session))
            await ask(client, own | {"system": system(billing, SYSTEM)}, session)
    told = await lines(log, 8)
    assert not any(line["divergence"] for line in told)
    assert len({line["prefix_hash"] for line in told}) == 1
    assert len({line["tools_hash"] for line in told}) == 1
    assert {line["tools_count"] for line in told} == {len(TOOLS)}
    for source in ([str(log)], ["--url", str(client._base_url)]):
        assert await asyncio.to_thread(main, source) == 0
        assert "No prompt diverges" in capsys.readouterr().out


async def test_a_line_tells_the_agent_and_the_moved_lines(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    client = await start(
        Engine("a", answer), request_log=str(log), diagnose=True, move_volatile_lines=True
    )
    hints = {"class": "subagent", "agent-id": "a1", "agent-type": "Explore"}
    headers = {
        "x-claude-code-request-class": hints["class"],
        "x-claude-code-agent-id": hints["agent-id"],
        "x-claude-code-agent-type": hints["agent-type"],
        "x-claude-code-prev-tool-durations": "Bash=34",
        "x-claude-code-prompt-id": "no word",
    }
    billing = "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_is_subagent=true;"
    for number, stated in enumerate((headers, {})):
        date = f"Today's date is 2026-11-2{number}.\n"
        body = messages(1, system=system(billing, date + SYSTEM))
        await ask(client, body, "s", **stated)
    first, second = await lines(log, 2)
    session = second["client"]["session"]
    assert first["client"] == {
        "program": "claude-cli",
        "version": "2.1.197",
        "request_class": "subagent",
        "agent_id": "a1",
        "agent_type": "Explore",
        "prev_tool_durations_ms": [["Bash", 34]],
        "is_subagent": True,
        "session": session,
        "ignored": ["x-claude-code-prompt-id"],
    }
    assert second["client"]["request_class"] == "subagent"
    assert first["session"] != second["session"]
    assert first["moved_lines"] == {"date": 1}
    assert first["prefix_hash"] == second["prefix_hash"]
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_volatile_lines_total{kind="date"} 2.0' in page
    assert 'sgl_ext_client_hints_ignored_total{hint="x-claude-code-prompt-id"} 1.0' in page


async def test_no_text_of_a_prompt_key_or_header_is_logged(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "requests.log"
    client = await start(
        Engine("a", answer), request_log=str(log), diagnose=True, hash_sessions=True
    )
    secrets = {"authorization": "Bearer sk-secret-key", "x-other": "secret-value"}
    for turn in range(3):
        body = clock(turn, turn)
        body["tools"] = [*TOOLS[turn:], *TOOLS[:turn], {"name": "secret_tool"}]
        body["messages"][0]["content"] = f"{SECRET} {turn}"
        await ask(client, body, "secret-session", **secrets)
    told = await lines(log, 3)
    assert any(line["divergence"] for line in told)
    url = str(client._base_url)
    findings = await (await client.get("/sgl_ext/divergences")).read()
    for text in (log.read_text(), findings.decode(), caplog.text):
        for secret in (SECRET, "secret", "12:00", "agent"):
            assert secret not in text.replace(url, "")


@pytest.mark.parametrize("hashes", [False, True])
async def test_a_session_has_one_name_in_log_page_and_pins(
    start: Start, tmp_path: Path, hashes: bool
) -> None:
    log = tmp_path / "requests.log"
    pin = {"prefix": "a" * 32, "segment": None, "tokens": 9, "ttl_s": 60.0, "left_s": 30.0}
    pin |= {"hits": 1, "owner": "team-a", "session": "s1"}
    engine, events = Engine("a", answer), asyncio.Queue[bytes]()
    report = {"seq": 0, "snapshot": True, "publishes": ["prefixes"], "pinned": [pin]}
    events.put_nowait(json.dumps(report).encode() + b"\n")
    engine.events.append(events)
    client = await start(engine, request_log=str(log), diagnose=True, hash_sessions=hashes)
    for turn in range(3):  # the system text changes with each turn
        await ask(client, clock(turn, turn), "s1")
    await ask(client, clock(0, 0), "s1", **{"x-claude-code-agent-id": "a1"})
    told = await lines(log, 4)
    async with asyncio.timeout(HANG_S):
        while not (found := await (await client.get("/sgl_ext/state")).json())["pins"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    name = shown_name("s1", "team-a", hashes=hashes)
    assert (name == "s1") is not hashes
    assert [line["session"] for line in told[:3]] == [name] * 3
    assert {line["client"]["session"] for line in told} == {name}
    of_agent = shown_name("s1/a1", "team-a", hashes=hashes)
    assert told[3]["session"] == of_agent
    assert {row["id"]: row["turns"] for row in found["sessions"]} == {name: 3, of_agent: 1}
    (program,) = found["programs"]
    assert (program["session"], program["agents"], program["turns"]) == (name, 2, 4)
    assert [row["session"] for row in found["pins"]] == [name]
    explained = await client.post(
        "/sgl_ext/explain/v1/messages",
        json=clock(0, 9),
        headers=CLAUDE | {"x-claude-code-session-id": "s1"},
    )
    assert (await explained.json())["session"] == name


async def test_a_prompt_that_cannot_be_compared_is_still_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(diagnosis, "read_blocks", fail)
    client = await start(Engine("a", answer), diagnose=True)
    for turn in range(2):
        await ask(client, clock(turn, turn), "s1")
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_prompts_not_compared_total{reason="error"} 1.0' in page
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


async def test_comparisons_take_a_bounded_share_of_the_time() -> None:
    now_s = [0.0]

    def clock_of_a_slow_machine() -> float:
        now_s[0] += 0.5
        return now_s[0]

    metrics, strip = Metrics(), HeaderStrip()
    router = Router(Workers(metrics), metrics)
    looks = diagnosis.DivergenceDetector(strip, metrics, clock=clock_of_a_slow_machine)
    found = []
    for turn in range(40):
        hints = {"session-id": "s"}
        raw = orjson.dumps(clock(turn, turn))
        stripped = strip_request(of_path(MESSAGES), orjson.loads(raw), strip)
        routing = routed(router, MESSAGES, hints, stripped.body, len(raw))
        result, _ = looks.diagnose(MESSAGES, NO_FACTS, hints, stripped, routing, raw)
        found.append(result.divergence is not None)
    assert any(found[:4])
    assert not all(found[8:])
    assert metrics.prompts_not_compared.counts[("busy",)] > 16


async def test_a_very_long_prompt_is_not_compared(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_MAX_BODY_BYTES", 20_000)
    client = await start(Engine("a", answer), diagnose=True)
    for turn in range(2):
        await ask(client, messages(system=system(f"{turn} o'clock", "x" * 20_000)), "s1")
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_prompts_not_compared_total{reason="long"} 2.0' in page
    counted = [line for line in page.splitlines() if "sgl_ext_diverged_prompts_total{" in line]
    assert all(line.endswith("} 0.0") for line in counted)


async def test_the_cached_share_can_be_computed_from_the_metrics(start: Start) -> None:
    engine = Engine("a", answer)
    client = await start(engine)
    await ask(client, messages(), "s1")
    page = await (await client.get("/metrics")).text()
    assert f'sgl_ext_prompt_tokens_total{{worker="{engine.url}"}} 1011.0' in page
    assert f'sgl_ext_reported_cached_tokens_total{{worker="{engine.url}"}} 900.0' in page


async def test_the_doctor_works_on_a_fresh_node_and_keeps_no_prompt(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.jsonl"
    client = await start(Engine("a", answer), request_log=str(log))
    assert await asyncio.to_thread(main, ["--url", str(client._base_url)]) == 0
    assert capsys.readouterr().out == "There are no prompts yet.\n"
    for turn in range(4):
        await ask(client, clock(turn, turn), "s1")
    assert await asyncio.to_thread(main, ["--url", str(client._base_url)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "claude-code: 4 prompts" in shown
    assert "system[1] turns clock: a date or time changes" in shown
    assert "move the date or time out of the instructions" in shown
    told = await lines(log, 4)
    assert [line["divergence"] is None for line in told] == [True, False, False, False]
    assert SECRET not in log.read_text()


@pytest.mark.parametrize("diagnose", [False, True])
async def test_two_programs_of_one_sdk_are_not_versions_of_each_other(
    start: Start, diagnose: bool
) -> None:
    client = await start(Engine("a", answer), diagnose=diagnose)
    programs = (("OpenAI/JS 6.26.0", "Pi"), ("ai-sdk/openai-compatible/3.0.37", "Cline"))
    for agent, name in programs:
        for session in range(5):
            text = f"You are {name}.\n" + "Be kind.\n" * 250 + SYSTEM + f"\nIn /home/{session}.\n"
            body = messages(system=system("You are an agent.", text))
            said = {"user-agent": agent, "x-session-id": f"{name} {session}"}
            async with client.post(MESSAGES, json=body, headers=said) as answered:
                assert answered.status == 200, await answered.text()
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_diverged_prompts_total{harness="sdk",kind="new_version"} 0.0' in page
    state = await (await client.get("/sgl_ext/state")).json()
    assert not [event for event in state["events"] if event["kind"] == "client version"]


@pytest.mark.parametrize("diagnose", [False, True])
async def test_a_new_version_that_breaks_the_cache_is_named_within_ten_requests(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    diagnose: bool,
) -> None:
    client = await start(Engine("a", answer), diagnose=diagnose)

    async def ask_as(version: str, session: int, first: str) -> None:
        text = "Be kind.\n" * 250 + first + SYSTEM + f"\nIn /home/{session}.\n"
        agent = {"user-agent": f"claude-cli/{version} (external, cli)"}
        body = messages(system=system("You are an agent.", text))
        await ask(client, body, f"{version} {session}", **agent)

    for session in range(5):
        await ask_as("2.1.332", session, "")
    for session in range(10):
        await ask_as("2.1.333", session, f"Session {session}a8f03c1e52d7b649.\n")
    page = await (await client.get("/metrics")).text()
    counted = 'sgl_ext_diverged_prompts_total{harness="claude-code",kind="new_version"} 2.0'
    assert counted in page
    said = [
        record.message for record in caplog.records if "2.1.333 moves byte 2,2" in record.message
    ]
    assert len(said) == 2
    state = await (await client.get("/sgl_ext/state")).json()
    events = [event for event in state["events"] if event["kind"] == "client version"]
    assert [event["subject"] for event in events] == ["claude-code 2.1.333"] * len(events)
    assert events
    assert "moves byte 2,2" in events[0]["text"]
    assert "from prompt to prompt" in said[1]
    assert "the cure is: move the id out of the instructions" in said[1]
    assert await asyncio.to_thread(main, ["--url", str(client._base_url)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "(version 2.1.332 -> 2.1.333)" in shown
    assert "system[1], byte 2,2" in shown


@pytest.mark.parametrize("diagnose", [False, True])
async def test_the_doctor_says_that_a_proxy_cuts_the_hour_that_a_client_asks_for(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], diagnose: bool
) -> None:
    log = tmp_path / "requests.log"
    client = await start(Engine("a", answer), request_log=str(log), diagnose=diagnose)
    hour, brief = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
    betas = {"anthropic-beta": "extended-cache-ttl-2025-04-11"}

    def marked(turn: int, control: dict[str, str]) -> dict[str, Any]:
        text = {"type": "text", "text": SYSTEM, "cache_control": control}
        return messages(turn, system=[text])

    for turn in range(3):
        await ask(client, marked(turn, brief), "cut", **betas)
    await ask(client, marked(0, hour), "whole", **betas)
    await ask(client, marked(0, brief), "usual")
    await ask(client, marked(0, brief), "sub", **betas, **{"x-claude-code-agent-id": "a1"})
    told = await lines(log, 6)
    kinds = [line["divergence"] and line["divergence"]["kind"] for line in told]
    assert kinds == ["ttl_cut"] * 3 + [None] * 3
    assert await asyncio.to_thread(main, ["--url", str(client._base_url)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "cache_control.ttl" in shown
    assert "LiteLLM cuts 1h to five minutes" in shown
